"""Pickled weights are downloaded and quantized only with --allow-pickle; without it, the hint of
the error is the command with it.
"""

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
UNUSED_FILES = {  # other files of the repository, which must never be downloaded
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
    """Return a copy of the checkpoint `stories` with its weights in one pickle."""
    copy = shutil.copytree(stories, tmp_path_factory.mktemp("pickled") / "old")
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / pickles.SINGLE_FILE)
    return copy


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the pickled checkpoint as REF on a fake hub."""
    with Hub() as server:
        server.add(REF, folder).files.update(UNUSED_FILES)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the import of torch fail."""
    monkeypatch.setitem(sys.modules, "torch", None)


def write_shards(weights: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """Write the weights to `folder` as two pickles with an index. Return the files by name."""
    names = sorted(weights)
    shard_of = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    for shard in SHARDS:
        torch.save(
            {name: weights[name] for name in names if shard_of[name] == shard}, folder / shard
        )
    (folder / pickles.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return {name: (folder / name).read_bytes() for name in (*SHARDS, pickles.INDEX_FILE)}


def document(result: Done) -> Any:
    """Return the JSON document of a command that succeeded."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def hint(result: Done) -> list[str]:
    """Return the words after `llmcli` of the command in the hint of a command that failed."""
    assert (result.code, result.out) == (1, "")
    error, last = result.err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert last.startswith("hint: llmcli ")
    return shlex.split(last.removeprefix("hint: llmcli "))


def tensors(path: str | Path) -> dict[str, tuple[str, bytes]]:
    """Return the type and the bytes of every tensor of a GGUF. (The headers of equal models differ,
    because they name the source.)
    """
    data = Path(path).read_bytes()
    return {
        t.name: (t.type, data[t.offset : t.offset + t.nbytes])
        for t in read_header.read_header(Path(path)).tensors
    }


@pytest.fixture
def expected(stories: Path, tmp_path: Path, llmcli: Llmcli) -> dict[str, tuple[str, bytes]]:
    """Return the tensors of the same model quantized from safetensors."""
    out = tmp_path / "expected.gguf"
    assert llmcli("quantize", str(stories), "--q4_k_m", "-o", str(out)).code == 0
    return tensors(out)


def downloaded(hub: Hub) -> set[str]:
    """Return the names of all files that were downloaded from the hub."""
    return {
        path.split("/resolve/")[1].split("/", 1)[1]
        for method, path, _ in hub.requests
        if method == "GET" and "/resolve/" in path
    }


@pytest.mark.parametrize("form", ["one", "shards", "another name"])
def test_pull_gives_the_same_file_as_safetensors_and_downloads_no_code(
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
        files |= write_shards(weights, tmp_path)
    elif form == "another name":
        files["weights.pth"] = files.pop(pickles.SINGLE_FILE)
    result = llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json")
    assert tensors(document(result)["path"]) == expected
    assert downloaded(hub).isdisjoint(UNUSED_FILES)
    assert [line for line in result.err.splitlines() if "pickle" in line] == [
        "org/old has pickled weights, which cannot be read in parts: 1.0 MiB are downloaded first and kept"
    ]


def test_pull_keeps_the_pickles_and_its_files_need_no_network(
    hub: Hub, llmcli: Llmcli, home: Path
) -> None:
    result = document(llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json"))
    hub.requests.clear()
    assert document(llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json")) == result
    # the quantized file is no pickle, so the flag is not needed
    assert document(llmcli("pull", REF, "--q4_k_m", "--json")) == result
    assert (
        document(llmcli("run", REF, "Once", "-n", "2", "-t", "1", "--json"))["model"]["path"]
        == result["path"]
    )
    rows = {row["name"]: row["file_type"] for row in document(llmcli("list", "--json"))}
    assert rows == {REF: "pickled", f"{REF}:Q4_K_M": "Q4_K_M"}
    assert llmcli("show", REF).code == 0
    assert hub.requests == []
    assert llmcli("rm", REF).code == 0
    assert not [
        path for path in home.rglob("*") if path.is_file() and path.stat().st_size > 100_000
    ]


def test_quantize_and_convert_read_pickles_with_the_flag(
    hub: Hub, llmcli: Llmcli, stories: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    assert llmcli("quantize", REF, "-t", "q4_k_m", "--allow-pickle", "-o", str(ours)).code == 0
    assert tensors(ours) == expected
    assert llmcli("convert", REF, "--allow-pickle", "-o", str(ours)).code == 0
    assert llmcli("convert", str(stories), "-o", str(theirs)).code == 0
    assert tensors(ours) == tensors(theirs)


@pytest.mark.parametrize(
    "command",
    [
        ("pull", REF),
        ("pull", REF, "--q4_k_m", "--json"),
        ("pull", f"{REF}:Q8_0"),
        ("quantize", REF, "-t", "q4_0"),
        ("convert", REF, "-o", "a file.gguf"),
    ],
)
def test_without_the_flag_nothing_is_downloaded_and_the_hint_is_the_command_with_it(
    command: tuple[str, ...],
    hub: Hub,
    llmcli: Llmcli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = llmcli(*command)
    assert "org/old has only pickled weights (pytorch_model.bin)" in refused.err
    assert downloaded(hub) == set()
    assert hint(refused) == [*command, "--allow-pickle"]
    assert llmcli(*hint(refused)).code == 0


def test_hint_of_run_is_the_pull_command_that_reads_pickles(hub: Hub, llmcli: Llmcli) -> None:
    command = ("run", REF, "Once", "-n", "2", "-t", "1", "--json")
    assert hint(llmcli(*command)) == ["pull", REF, "--quant", "Q4_K_M", "--allow-pickle"]
    # the pickles are now on this disk, but they are not quantized
    assert llmcli("pull", REF, "--allow-pickle").code == 0
    n_requests = len(hub.requests)
    refused = llmcli(*command, "--quant", "q8_0")
    assert hint(refused) == ["pull", REF, "--quant", "Q8_0", "--allow-pickle"]
    assert llmcli(*hint(refused)).code == 0
    assert document(llmcli(*command, "--quant", "q8_0"))["model"]["file_type"] == "Q8_0"
    assert len(hub.requests) == n_requests


def test_hints_for_a_local_folder(folder: Path, llmcli: Llmcli, tmp_path: Path) -> None:
    folder_copy = shutil.copytree(folder, tmp_path / "old one")
    refused = llmcli("run", f"{folder_copy}/", "Once", "-n", "2", "-t", "1", "--json")
    assert hint(refused) == ["pull", f"{folder_copy}/", "--quant", "Q4_K_M", "--allow-pickle"]
    assert llmcli(*hint(refused)).code == 0
    assert (
        document(llmcli("run", f"{folder_copy}/", "Once", "-n", "2", "-t", "1", "--json"))["model"][
            "file_type"
        ]
        == "Q4_K_M"
    )
    again = ("quantize", str(folder_copy), "-t", "q8_0")
    assert hint(llmcli(*again)) == [*again, "--allow-pickle"]


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    "command", [("pull", REF, "--q4_k_m"), ("quantize", REF), ("convert", REF)]
)
def test_without_torch_the_error_says_what_to_install_before_any_download(
    command: tuple[str, ...], hub: Hub, llmcli: Llmcli
) -> None:
    refused = llmcli(*command, "--allow-pickle")
    assert refused.code == 1
    assert refused.err.splitlines() == [
        "error: pickled weights are read with torch, which is not installed",
        "hint: pip install 'llmcli[torch]'",
    ]
    assert downloaded(hub) == set()


@pytest.mark.usefixtures("no_torch")
def test_safetensors_are_preferred_to_pickles_even_with_the_flag(
    hub: Hub, llmcli: Llmcli, stories: Path, expected: dict[str, Any]
) -> None:
    hub.repos[REF].files["model.safetensors"] = (stories / "model.safetensors").read_bytes()
    result = llmcli("pull", REF, "--q4_k_m", "--allow-pickle", "--json")
    assert tensors(document(result)["path"]) == expected
    assert "in parts from the hub" in result.err
    assert pickles.SINGLE_FILE not in downloaded(hub)


def test_interrupted_pull_resumes_the_download_and_the_quantization(
    hub: Hub, llmcli: Llmcli, home: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, command = _Lines.advance, ("pull", REF, "--q4_k_m", "--allow-pickle", "--json")

    def interrupt(label: str, after: int) -> Callable[[_Lines, int], None]:
        def advance_and_interrupt(bar: _Lines, amount: int) -> None:
            advance(bar, amount)
            if label in bar.label and bar.count > after:
                raise KeyboardInterrupt

        return advance_and_interrupt

    for label, after in ((REF, 600_000), ("quantize", 20)):
        with monkeypatch.context() as patch:
            patch.setattr(_Lines, "advance", interrupt(label, after))
            assert llmcli(*command).code == 130
        assert not list(home.rglob("*.gguf"))
        assert [row["name"] for row in document(llmcli("list", "--json"))] == (
            [] if label == REF else [REF]
        )
    result = llmcli(*command)
    assert tensors(document(result)["path"]) == expected
    assert "resumed an earlier run" in result.err
    first, second = hub.gets(pickles.SINGLE_FILE)
    assert first is None
    assert second is not None and int(second.removeprefix("bytes=").rstrip("-")) > 500_000


class Bomb:
    """An object that creates the file `target` when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_code_in_a_pickle_is_not_run_and_no_file_is_written(
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
    ("change", "message"),
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
def test_repository_without_a_checkpoint_is_refused_before_any_download(
    flag: tuple[str, ...], change: dict[str, bytes | None], message: str, hub: Hub, llmcli: Llmcli
) -> None:
    files = hub.repos[REF].files
    changed = {name: data for name, data in (files | change).items() if data is not None}
    files.clear()
    files.update(changed)
    refused = llmcli("pull", REF, "--q4_k_m", *flag)
    assert refused.code == 1
    assert message in refused.err
    assert downloaded(hub) == set()


def test_missing_shard_is_named_offline(
    hub: Hub, llmcli: Llmcli, weights: dict[str, Any], tmp_path: Path
) -> None:
    files = hub.repos[REF].files
    del files[pickles.SINGLE_FILE]
    files |= write_shards(weights, tmp_path)
    commit = document(llmcli("pull", REF, "--allow-pickle", "--json"))["revision"]
    (shard,) = (tmp_path / "home" / "huggingface").rglob(f"snapshots/*/{SHARDS[1]}")
    shard.unlink()
    refused = llmcli("pull", REF, "--revision", commit, "--allow-pickle", "--offline")
    assert refused.code == 1
    assert (
        f"only a part of org/old is in the Hugging Face cache ({SHARDS[1]} is missing)"
        in refused.err
    )
