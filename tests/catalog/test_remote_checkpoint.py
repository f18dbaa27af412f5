"""A checkpoint on the hub is quantized while it is read in parts, without a copy on the disk."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmcli.ui import _Lines
from quant.model_file import read_header
from quant.quantize import pipeline
from tests.fixtures.cli import Done
from tests.fixtures.fake_hub import Faults, Hub
from tests.quant import tiny_checkpoint

Llmcli = Callable[..., Done]
REF = "org/grown"
HEADS = (
    70_000 * 3
)  # bytes of three shards that are read before the weights, and again by every command
SAMPLES = 64 * 4096


@pytest.fixture(scope="session")
def folder(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 25 MB in three shards."""
    return tiny_checkpoint.grown(stories, tmp_path_factory.mktemp("checkpoint") / "grown")


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has it; no waiting between tries."""
    from llmcli.catalog.hub import retry

    monkeypatch.setattr(retry.time, "sleep", lambda _: None)
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 1 << 18)
    with Hub() as server:
        server.add(REF, folder)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def expected(hub: Hub, tmp_path: Path, llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What quantizing the same checkpoint from the disk gives, downloaded into a home of its own."""
    with monkeypatch.context() as patch:
        patch.setenv("LLMCLI_HOME", str(tmp_path / "other"))
        patch.setenv("HF_HOME", str(tmp_path / "other" / "huggingface"))
        made = Path(
            pulled(llmcli("pull", REF, "--q4_k_m", "--keep-source", "--json"))["path"]
        ).read_bytes()
    shutil.rmtree(tmp_path / "other")
    hub.requests.clear()
    return made


def pulled(done: Done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor: a folder's file does not name the repository that the hub's
    names.
    """
    data = path.read_bytes()
    return {
        t.name: (t.type, data[t.offset : t.offset + t.nbytes])
        for t in read_header.read_header(path).tensors
    }


def weights(hub: Hub) -> list[tuple[int, int]]:
    """Every range of the shards that was asked for, first and last byte."""
    ranges = [
        asked
        for method, path, asked in hub.requests
        if method == "GET" and path.endswith(".safetensors")
    ]
    assert all(ranges), "a whole shard was asked for"
    return [tuple(map(int, asked.removeprefix("bytes=").split("-"))) for asked in ranges if asked]  # type: ignore[misc]


def fetched(hub: Hub) -> int:
    return sum(last - first + 1 for first, last in weights(hub))


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def taken(home: Path) -> int:
    """Bytes of the disk under the homes of llmcli and of the hub's cache."""
    return sum(
        path.lstat().st_blocks * 512
        for path in home.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_with_faults_in_every_twentieth_answer_the_file_is_the_one_from_disk_and_little_lies_here(
    seed: int,
    hub: Hub,
    expected: bytes,
    llmcli: Llmcli,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llmcli.catalog.hub import range_reader
    from llmcli.catalog.sources import hub as source

    peak, advance = [0], _Lines.advance

    def sample(bar: _Lines, amount: int) -> None:
        peak.append(taken(home))
        advance(bar, amount)

    monkeypatch.setattr(_Lines, "advance", sample)
    for module in (range_reader, source):  # one that is too short for a busy machine is tried again
        monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.5)
    hub.faults = Faults(seed)
    made = pulled(llmcli("pull", REF, "--q4_k_m", "--json"))
    assert len(hub.faults.happened) >= 5
    assert Path(made["path"]).read_bytes() == expected
    assert made["sha256"] == hashlib.sha256(expected).hexdigest()
    assert len(expected) < max(peak) <= 1.1 * len(expected)
    assert taken(home) <= 1.1 * len(expected)


def test_every_byte_of_the_weights_is_asked_for_once(
    hub: Hub, llmcli: Llmcli, folder: Path
) -> None:
    done = llmcli("pull", f"{REF}:Q4_K_M", "--json")
    made = pulled(done)
    assert made | {"path": "", "sha256": "", "bytes": 0} == {
        "name": f"{REF}:Q4_K_M",
        "path": "",
        "bytes": 0,
        "sha256": "",
        "source": f"quantized:{REF}",
        "revision": hub.repos[REF].commit,
    }
    # q and k are read by heads, which slabs cut: a little more than once
    assert stored(folder) <= fetched(hub) <= 1.1 * stored(folder) + HEADS + SAMPLES
    assert "in parts from the hub" in done.err
    assert "sha256 of parts cannot be" in done.err


def test_it_is_the_same_record_as_after_a_download(hub: Hub, llmcli: Llmcli, home: Path) -> None:
    straight = pulled(llmcli("pull", REF, "--q4_k_m", "--json"))
    record = json.loads((Path(straight["path"]).parent / "manifest.json").read_text())
    assert record["settings"]["sha256_unchecked"] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    assert "config.json" in record["settings"]["sha256_checked"]
    assert llmcli("rm", REF).code == 0
    kept = pulled(llmcli("pull", REF, "--q4_k_m", "--keep-source", "--json"))
    assert kept == straight
    again = json.loads((Path(kept["path"]).parent / "manifest.json").read_text())
    assert again["settings"]["source_sha256"] == record["settings"]["source_sha256"]
    assert {key: again[key] for key in again.keys() - {"settings", "created", "files"}} == {
        key: record[key] for key in record.keys() - {"settings", "created", "files"}
    }
    assert any(
        path.stat().st_size > 1 << 20 for path in (home / "huggingface").rglob("*.safetensors")
    )


def test_what_is_here_needs_no_network_under_any_of_its_names(hub: Hub, llmcli: Llmcli) -> None:
    made = pulled(llmcli("pull", REF, "--q4_k_m", "--json"))
    hub.requests.clear()
    for words in (
        ("pull", REF, "--q4_k_m"),
        ("pull", f"{REF}:Q4_K_M"),
        ("pull", REF, "--q4_k_m", "--offline"),
        ("show", f"{REF}:Q4_K_M"),
        ("show", REF),
    ):
        assert pulled(llmcli(*words, "--json"))["path"] == made["path"]
    (row,) = pulled(llmcli("list", "--json"))
    assert (row["name"], row["path"], row["revision"]) == (
        f"{REF}:Q4_K_M",
        made["path"],
        made["revision"],
    )
    answer = pulled(llmcli("run", REF, "Once", "-n", "2", "-t", "1", "--json"))
    assert answer["model"]["path"] == made["path"]
    assert hub.requests == []


def test_another_type_is_not_made_of_the_one_that_is_here(
    hub: Hub, llmcli: Llmcli, folder: Path, tmp_path: Path
) -> None:
    pulled(llmcli("pull", REF, "--q4_k_m", "--json"))
    other = pulled(llmcli("run", REF, "Once", "--quant", "q8_0", "-n", "1", "-t", "1", "--json"))
    assert other["model"]["file_type"] == "Q8_0"
    direct = tmp_path / "direct.gguf"
    assert llmcli("quantize", str(folder), "--q8_0", "-o", str(direct)).code == 0
    assert tensors(Path(other["model"]["path"])) == tensors(direct)


def test_offline_a_checkpoint_that_is_not_here_is_refused(hub: Hub, llmcli: Llmcli) -> None:
    done = llmcli("pull", REF, "--q4_k_m", "--offline")
    assert (done.code, hub.requests) == (1, [])
    assert "llmcli is offline" in done.err
    commit = pulled(llmcli("pull", REF, "--q4_k_m", "--json"))["revision"]
    done = llmcli("pull", REF, "--revision", commit, "--offline")
    assert done.code == 1
    assert (
        "only a part of org/grown is in the Hugging Face cache (model-00001-of-00003.safetensors is missing)"
        in done.err
    )


def test_only_the_output_must_fit_on_the_disk(
    hub: Hub, expected: bytes, llmcli: Llmcli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=len(expected)))
    assert stored(folder) > 2 * len(expected)
    assert Path(pulled(llmcli("pull", REF, "--q4_k_m", "--json"))["path"]).read_bytes() == expected
    assert llmcli("rm", REF).code == 0
    done = llmcli("pull", REF, "--q4_k_m", "--keep-source")
    assert done.code == 1
    assert "not enough disk" in done.err


def test_a_server_that_gives_no_parts_is_said_and_the_checkpoint_is_downloaded(
    hub: Hub, expected: bytes, llmcli: Llmcli, folder: Path
) -> None:
    hub.ignore_range = True
    done = llmcli("pull", REF, "--q4_k_m", "--json")
    assert Path(pulled(done)["path"]).read_bytes() == expected
    assert (
        "does not send parts of model-00001-of-00003.safetensors (status 200): downloading the whole"
        in done.err
    )
    assert pulled(llmcli("show", REF, "--json"))["bytes"] > stored(folder)


def test_the_token_goes_to_the_hub_alone_and_an_address_that_expires_is_asked_for_again(
    hub: Hub, expected: bytes, llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REF].token, hub.redirects = "secret", True
    monkeypatch.setenv("HF_TOKEN", "secret")
    for lasting in (True, False):
        hub.lasting = lasting
        hub.requests.clear()
        hub.elsewhere.clear()
        made = pulled(llmcli("pull", REF, "--q4_k_m", "--force", "--json"))
        assert Path(made["path"]).read_bytes() == expected
        assert hub.elsewhere
        assert {token for _, _, token in hub.elsewhere} == {None}
        asked = len(weights(hub))
        assert asked < 30 if lasting else asked > 60  # the address is used again while it is good
        assert llmcli("rm", REF).code == 0


@pytest.mark.parametrize(
    ("switch", "said"), [({"gated": True}, "is gated"), ({"token": "x"}, "no public model")]
)
def test_what_the_hub_refuses_is_told_as_ever(
    hub: Hub, llmcli: Llmcli, folder: Path, switch, said
) -> None:
    hub.add(REF, folder, **switch)
    done = llmcli("pull", REF, "--q4_k_m")
    assert done.code == 1
    assert said in done.err


def test_an_interrupted_pull_goes_on_and_asks_for_no_finished_tensor_again(
    hub: Hub,
    folder: Path,
    expected: bytes,
    llmcli: Llmcli,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, advance = iter(range(20)), _Lines.advance

    def stop(bar: _Lines, amount: int) -> None:
        if "quantize" in bar.label and next(count, None) is None:
            raise KeyboardInterrupt
        advance(bar, amount)

    with monkeypatch.context() as patch:
        patch.setattr(_Lines, "advance", stop)
        assert llmcli("pull", REF, "--q4_k_m").code == 130
    assert not list(home.rglob("*.gguf"))
    with Hub() as other:  # the reads that were under way still ask the first one
        other.add(REF, folder)
        monkeypatch.setenv("HF_ENDPOINT", other.url)
        done = llmcli("pull", REF, "--q4_k_m", "--json")
        assert Path(pulled(done)["path"]).read_bytes() == expected
        assert "resumed an earlier run" in done.err
        assert fetched(other) < 0.7 * stored(folder)


def test_a_hub_that_goes_away_is_told_and_what_was_made_is_kept(
    hub: Hub, expected: bytes, llmcli: Llmcli
) -> None:
    class Failing(list):  # type: ignore[type-arg]
        def append(self, asked: object) -> None:
            super().append(asked)
            hub.status = 503 if len(self) > 115 else None

    hub.requests = Failing()
    done = llmcli("pull", REF, "--q4_k_m")
    assert done.code == 1
    assert "the hub failed with status 503" in done.err
    hub.requests, hub.status = [], None
    again = llmcli("pull", REF, "--q4_k_m", "--json")
    assert Path(pulled(again)["path"]).read_bytes() == expected
    assert "resumed an earlier run" in again.err


def test_a_file_that_becomes_another_is_noticed(
    hub: Hub, llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, repo = _Lines.advance, hub.repos[REF]

    def change(bar: _Lines, amount: int) -> None:
        if "quantize" in bar.label:
            name = "model-00002-of-00003.safetensors"
            repo.files[name] = repo.files[name][:-1] + b"\1"
        advance(bar, amount)

    monkeypatch.setattr(_Lines, "advance", change)
    done = llmcli("pull", REF, "--q4_k_m")
    assert done.code == 1
    assert "model-00002-of-00003.safetensors of org/grown has changed since" in done.err


def test_quantize_and_convert_take_a_hubs_checkpoint_as_it_comes(
    hub: Hub, folder: Path, expected: bytes, llmcli: Llmcli, tmp_path: Path, home: Path
) -> None:
    out = tmp_path / "out.gguf"
    plan = pulled(llmcli("quantize", REF, "--q4_k_m", "-o", str(out), "--dry-run", "--json"))
    assert (plan["bytes"], fetched(hub) < HEADS + SAMPLES) == (len(expected), True)
    assert pulled(llmcli("quantize", REF, "--q4_k_m", "--dry-run", "--json"))["bytes"] == len(
        expected
    )
    assert not list(home.rglob("*Q4_K_M*"))
    assert llmcli("quantize", REF, "--q4_k_m", "-o", str(out)).code == 0
    assert out.read_bytes() == expected
    assert llmcli("convert", REF, "-o", str(tmp_path / "c.gguf")).code == 0
    assert llmcli("convert", str(folder), "-o", str(tmp_path / "d.gguf")).code == 0
    assert tensors(tmp_path / "c.gguf") == tensors(tmp_path / "d.gguf")


def test_rm_takes_the_small_files_too_and_gc_what_was_never_finished(
    hub: Hub, llmcli: Llmcli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("--q4_k_m", "--q8_0"):
        pulled(llmcli("pull", REF, kind, "--json"))
    blobs = home / "huggingface" / "hub" / "models--org--grown" / "blobs"
    before = len(list(blobs.iterdir()))
    assert before >= 4
    assert llmcli("rm", f"{REF}:Q8_0").code == 0
    assert len(list(blobs.iterdir())) == before  # the other one's too
    assert llmcli("rm", REF).code == 0
    assert not blobs.exists() or not list(blobs.iterdir())
    assert pulled(llmcli("list", "--json")) == []
    with monkeypatch.context() as patch:
        patch.setattr(_Lines, "advance", lambda bar, _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert llmcli("pull", REF, "--q4_k_m").code == 130
    assert llmcli("gc").code == 0
    assert not list((home / "data" / "models").rglob("*.part"))
