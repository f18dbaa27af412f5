"""Pickled weights on the hub are fetched and quantized only if the user allows it."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcli.ui import _Lines
from quant.checkpoint import pickles
from quant.model_file import read_header
from tests.fixtures.cli import Done
from tests.fixtures.fake_hub import Hub
from tests.quant import tiny_checkpoint

torch = pytest.importorskip("torch", reason="torch is not installed: pickles have no writer")

Llmcli = Callable[..., Done]
REF = "org/old"
NEVER = {  # what stands beside, and is never fetched
    "modeling_old.py": b"raise SystemExit(9)\n",
    "training_args.bin": b"x" * 70_000,
    "optimizer.pt": b"x" * 70_000,
    "original/consolidated.00.pth": b"x" * 70_000,
    "tf_model.h5": b"x" * 70_000,
    "ggml-model-q4_0.bin": b"x" * 70_000,
}
SHARDS = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]


@pytest.fixture(scope="session")
def weights(stories: Path) -> dict[str, Any]:
    return {
        name: torch.from_numpy(a.copy())
        for name, a in tiny_checkpoint.read(stories / "model.safetensors").items()
    }


@pytest.fixture(scope="session")
def folder(
    stories: Path, weights: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The stories with their weights in one pickle."""
    made = shutil.copytree(stories, tmp_path_factory.mktemp("pickled") / "old")
    (made / "model.safetensors").unlink()
    torch.save(weights, made / pickles.SINGLE_FILE)
    return made


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        server.add(REF, folder).files.update(NEVER)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def sharded(weights: dict[str, Any], place: Path) -> dict[str, bytes]:
    """The weights in two pickles with their index."""
    names = sorted(weights)
    places = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    for shard in SHARDS:
        torch.save({name: weights[name] for name in names if places[name] == shard}, place / shard)
    (place / pickles.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return {name: (place / name).read_bytes() for name in (*SHARDS, pickles.INDEX_FILE)}


def done(made: Done) -> Any:
    assert made.code == 0, made.err
    return json.loads(made.out)


def hint(made: Done) -> list[str]:
    """The words of the command that is hinted at, llmcli's name aside; the error is one line."""
    assert (made.code, made.out) == (1, "")
    error, last = made.err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert last.startswith("hint: llmcli ")
    return shlex.split(last.removeprefix("hint: llmcli "))


def tensors(path: str | Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor: the header names the source, which differs."""
    data = Path(path).read_bytes()
    return {
        t.name: (t.type, data[t.offset : t.offset + t.nbytes])
        for t in read_header.read_header(Path(path)).tensors
    }


@pytest.fixture
def expected(stories: Path, tmp_path: Path, llmcli: Llmcli) -> dict[str, tuple[str, bytes]]:
    """What the same weights give as safetensors."""
    out = tmp_path / "expected.gguf"
    assert llmcli("quantize", str(stories), "--q4_k_m", "-o", str(out)).code == 0
    return tensors(out)


def fetched(hub: Hub) -> set[str]:
    """Names of all files whose content was asked for."""
    return {
        path.split("/resolve/")[1].split("/", 1)[1]
        for method, path, _ in hub.requests
        if method == "GET" and "/resolve/" in path
    }


@pytest.mark.parametrize("form", ["one", "shards", "another name"])
def test_a_pull_gives_the_file_that_safetensors_give_and_fetches_no_code(
    form: str,
    hub: Hub,
    llmcli: Llmcli,
    weights: dict[str, Any],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    files = hub.repos[REF].files
    if form == "shards":
        del files[pickles.SINGLE_FILE]
        files |= sharded(weights, tmp_path)
    elif form == "another name":
        files["weights.pth"] = files.pop(pickles.SINGLE_FILE)
    made = llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json")
    assert tensors(done(made)["path"]) == expected
    assert fetched(hub).isdisjoint(NEVER)
    assert [line for line in made.err.splitlines() if "pickle" in line] == [
        "org/old has pickled weights, which cannot be read in parts: 1.0 MiB are downloaded first and kept"
    ]


def test_the_source_stays_as_with_keep_source_and_all_that_was_made_needs_no_network(
    hub: Hub, llmcli: Llmcli, home: Path
) -> None:
    made = done(llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json"))
    hub.requests.clear()
    assert done(llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json")) == made
    assert (
        done(llmcli("pull", REF, "--q4_k_m", "--json")) == made
    )  # what is there is no pickle any more
    assert (
        done(llmcli("run", REF, "Once", "-n", "2", "-t", "1", "--json"))["model"]["path"]
        == made["path"]
    )
    rows = {row["name"]: row["file_type"] for row in done(llmcli("list", "--json"))}
    assert rows == {REF: "pickled", f"{REF}:Q4_K_M": "Q4_K_M"}
    assert llmcli("show", REF).code == 0
    assert hub.requests == []
    assert llmcli("rm", REF).code == 0
    assert not [
        path for path in home.rglob("*") if path.is_file() and path.stat().st_size > 100_000
    ]


def test_quantize_and_convert_take_it_too(
    hub: Hub, llmcli: Llmcli, stories: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    assert llmcli("quantize", REF, "-t", "q4_k_m", "--allow-pickle", "-o", str(ours)).code == 0
    assert tensors(ours) == expected
    assert llmcli("convert", REF, "--allow-pickle", "-o", str(ours)).code == 0
    assert llmcli("convert", str(stories), "-o", str(theirs)).code == 0
    assert tensors(ours) == tensors(theirs)


@pytest.mark.parametrize(
    "words",
    [
        ("pull", REF),
        ("pull", REF, "--q4_k_m", "--json"),
        ("pull", f"{REF}:Q8_0"),
        ("quantize", REF, "-t", "q4_0"),
        ("convert", REF, "-o", "a file.gguf"),
    ],
)
def test_without_the_flag_nothing_is_fetched_and_the_same_command_with_it_is_the_hint(
    words: tuple[str, ...],
    hub: Hub,
    llmcli: Llmcli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = llmcli(*words)
    assert "org/old has only pickled weights (pytorch_model.bin)" in refused.err
    assert fetched(hub) == set()
    assert hint(refused) == [*words, "--allow-pickle"]
    assert llmcli(*hint(refused)).code == 0


def test_what_runs_models_names_the_pull_that_reads_pickles(hub: Hub, llmcli: Llmcli) -> None:
    words = ("run", REF, "Once", "-n", "2", "-t", "1", "--json")
    assert hint(llmcli(*words)) == ["pull", REF, "--quant", "Q4_K_M", "--allow-pickle"]
    assert (
        llmcli("pull", REF, "--allow-pickle").code == 0
    )  # the pickles are here now, and nothing was made of them
    asked = len(hub.requests)
    refused = llmcli(*words, "--quant", "q8_0")
    assert hint(refused) == ["pull", REF, "--quant", "Q8_0", "--allow-pickle"]
    assert llmcli(*hint(refused)).code == 0
    assert done(llmcli(*words, "--quant", "q8_0"))["model"]["file_type"] == "Q8_0"
    assert len(hub.requests) == asked


def test_a_folder_here_is_taken_the_same_way(folder: Path, llmcli: Llmcli, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "old one")
    refused = llmcli("run", f"{place}/", "Once", "-n", "2", "-t", "1", "--json")
    assert hint(refused) == ["pull", f"{place}/", "--quant", "Q4_K_M", "--allow-pickle"]
    assert llmcli(*hint(refused)).code == 0
    assert (
        done(llmcli("run", f"{place}/", "Once", "-n", "2", "-t", "1", "--json"))["model"][
            "file_type"
        ]
        == "Q4_K_M"
    )
    again = ("quantize", str(place), "-t", "q8_0")
    assert hint(llmcli(*again)) == [*again, "--allow-pickle"]


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("words", [("pull", REF, "--q4_k_m"), ("quantize", REF), ("convert", REF)])
def test_without_torch_it_says_what_to_install_before_anything_is_fetched(
    words: tuple[str, ...], hub: Hub, llmcli: Llmcli
) -> None:
    refused = llmcli(*words, "--allow-pickle")
    assert refused.code == 1
    assert refused.err.splitlines() == [
        "error: pickled weights are read with torch, which is not installed",
        "hint: pip install 'llmcli[torch]'",
    ]
    assert fetched(hub) == set()


@pytest.mark.usefixtures("no_torch")
def test_safetensors_win_whatever_is_allowed(
    hub: Hub, llmcli: Llmcli, stories: Path, expected: dict[str, Any]
) -> None:
    hub.repos[REF].files["model.safetensors"] = (stories / "model.safetensors").read_bytes()
    made = llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json")
    assert tensors(done(made)["path"]) == expected
    assert "in parts from the hub" in made.err
    assert pickles.SINGLE_FILE not in fetched(hub)


def test_an_interrupted_pull_goes_on_in_the_download_and_in_the_quantization(
    hub: Hub, llmcli: Llmcli, home: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, words = _Lines.advance, ("pull", REF, "--q4_k_m", "--allow-pickle", "--json")

    def stop(label: str, after: int) -> Callable[[_Lines, int], None]:
        def stopped(bar: _Lines, amount: int) -> None:
            advance(bar, amount)
            if label in bar.label and bar.count > after:
                raise KeyboardInterrupt

        return stopped

    for label, after in ((REF, 600_000), ("quantize", 20)):
        with monkeypatch.context() as patch:
            patch.setattr(_Lines, "advance", stop(label, after))
            assert llmcli(*words).code == 130
        assert not list(home.rglob("*.gguf"))
        assert [row["name"] for row in done(llmcli("list", "--json"))] == (
            [] if label == REF else [REF]
        )
    made = llmcli(*words)
    assert tensors(done(made)["path"]) == expected
    assert "resumed an earlier run" in made.err
    first, second = hub.gets(pickles.SINGLE_FILE)
    assert first is None
    assert second is not None and int(second.removeprefix("bytes=").rstrip("-")) > 500_000


class Bomb:
    """What unpickling would run."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_code_in_a_pickle_is_not_run_and_nothing_is_made_of_it(
    hub: Hub, llmcli: Llmcli, weights: dict[str, Any], tmp_path: Path, home: Path
) -> None:
    torch.save(weights | {"bomb": Bomb(tmp_path / "touched")}, tmp_path / "bomb.bin")
    hub.repos[REF].files[pickles.SINGLE_FILE] = (tmp_path / "bomb.bin").read_bytes()
    refused = llmcli("pull", REF, "--q4_k_m", "--allow-pickle")
    assert refused.code == 1
    assert "pytorch_model.bin cannot be read: Weights only load failed" in refused.err
    assert "Traceback" not in refused.err
    assert not (tmp_path / "touched").exists()
    assert not list(home.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {pickles.SINGLE_FILE: None, "a.pt": b"x", "b.pth": b"x"},
            "has 2 pickled files and no pytorch_model.bin: a.pt, b.",
        ),
        ({"config.json": None}, "has weights but no config.json"),
        ({pickles.SINGLE_FILE: None}, "contains neither GGUF nor safetensors"),
    ],
)
@pytest.mark.parametrize("flag", [(), ("--allow-pickle",)])
def test_what_is_no_checkpoint_is_refused_before_anything_is_fetched(
    flag: tuple[str, ...], change: dict[str, bytes | None], said: str, hub: Hub, llmcli: Llmcli
) -> None:
    files = hub.repos[REF].files
    changed = {name: data for name, data in (files | change).items() if data is not None}
    files.clear()
    files.update(changed)
    refused = llmcli("pull", REF, "--q4_k_m", *flag)
    assert refused.code == 1
    assert said in refused.err
    assert fetched(hub) == set()


def test_offline_a_missing_shard_is_told(
    hub: Hub, llmcli: Llmcli, weights: dict[str, Any], tmp_path: Path
) -> None:
    files = hub.repos[REF].files
    del files[pickles.SINGLE_FILE]
    files |= sharded(weights, tmp_path)
    commit = done(llmcli("pull", REF, "--allow-pickle", "--json"))["revision"]
    (shard,) = (tmp_path / "home" / "huggingface").rglob(f"snapshots/*/{SHARDS[1]}")
    shard.unlink()
    refused = llmcli("pull", REF, "--revision", commit, "--allow-pickle", "--offline")
    assert refused.code == 1
    assert (
        f"only a part of org/old is in the Hugging Face cache ({SHARDS[1]} is missing)"
        in refused.err
    )
