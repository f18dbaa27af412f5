"""Pulling a remote checkpoint: it is quantized while it is read in parts from a fake hub."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmcli.catalog.hub import content_check
from llmcli.ui import _Lines
from quant.model_file import read_header
from quant.quantize import pipeline
from tests.fixtures.cli import Done
from tests.fixtures.fake_hub import Faults, Hub
from tests.quant import tiny_checkpoint

Llmcli = Callable[..., Done]
REF = "org/grown"
# Bytes of the three shards that every command reads in advance, before the weights.
ADVANCE_BYTES = 70_000 * 3
# Bytes that are read a second time, as samples of the weights, each in whole blocks.
SAMPLE_BYTES = 64 * 2 * content_check.BLOCK_BYTES


@pytest.fixture(scope="session")
def folder(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 25 MB in three shards."""
    return tiny_checkpoint.random_llama(stories, tmp_path_factory.mktemp("checkpoint") / "grown")


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the checkpoint. Retries do not wait."""
    from llmcli.catalog.hub import retry

    monkeypatch.setattr(retry.time, "sleep", lambda _: None)
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 1 << 18)
    with Hub() as server:
        server.add(REF, folder)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def expected(hub: Hub, tmp_path: Path, llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The GGUF that is quantized from the checkpoint after a complete download."""
    with monkeypatch.context() as patch:
        patch.setenv("LLMCLI_HOME", str(tmp_path / "other"))
        patch.setenv("HF_HOME", str(tmp_path / "other" / "huggingface"))
        expected_gguf = Path(
            json_output(llmcli("pull", REF, "--q4_k_m", "--keep-source", "--json"))["path"]
        ).read_bytes()
    shutil.rmtree(tmp_path / "other")
    hub.requests.clear()
    return expected_gguf


def json_output(result: Done) -> dict:
    """Return the JSON that a successful command printed."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return the type and the bytes of every tensor. (The metadata of a GGUF from a folder and from
    the hub differ, because only the latter contains the repository's name.)
    """
    data = path.read_bytes()
    return {
        tensor.name: (tensor.type, data[tensor.offset : tensor.offset + tensor.nbytes])
        for tensor in read_header.read_header(path).tensors
    }


def requested_ranges(hub: Hub) -> list[tuple[int, int]]:
    """Return the first and the last byte of every range of the shards that was requested."""
    ranges = [
        header
        for method, path, header in hub.requests
        if method == "GET" and path.endswith(".safetensors")
    ]
    assert all(ranges), "a complete shard was requested"
    return [
        tuple(map(int, header.removeprefix("bytes=").split("-"))) for header in ranges if header
    ]  # type: ignore[misc]


def requested_bytes(hub: Hub) -> int:
    return sum(last - first + 1 for first, last in requested_ranges(hub))


def weight_bytes(folder: Path) -> int:
    """Return the size of the safetensors of a checkpoint."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def occupied_bytes(home: Path) -> int:
    """Return the bytes of disk that all files in a folder occupy."""
    return sum(
        path.lstat().st_blocks * 512
        for path in home.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_pull_with_many_failed_requests_needs_little_disk_and_gives_the_expected_gguf(
    seed: int,
    hub: Hub,
    expected: bytes,
    llmcli: Llmcli,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llmcli.catalog.hub import exchange

    usages, advance = [0], _Lines.advance

    def sample(bar: _Lines, amount: int) -> None:
        usages.append(occupied_bytes(home))
        advance(bar, amount)

    monkeypatch.setattr(_Lines, "advance", sample)
    # On a busy machine this is sometimes too short. The request is then repeated.
    monkeypatch.setattr(exchange, "TIMEOUT_SECONDS", 0.5)
    hub.faults = Faults(seed)
    model = json_output(llmcli("pull", REF, "--q4_k_m", "--json"))
    assert len(hub.faults.happened) >= 5
    assert Path(model["path"]).read_bytes() == expected
    assert model["sha256"] == hashlib.sha256(expected).hexdigest()
    assert len(expected) < max(usages) <= 1.1 * len(expected)
    assert occupied_bytes(home) <= 1.1 * len(expected)


def test_every_byte_of_the_weights_is_requested_about_once(
    hub: Hub, llmcli: Llmcli, folder: Path
) -> None:
    result = llmcli("pull", f"{REF}:Q4_K_M", "--json")
    model = json_output(result)
    assert model | {"path": "", "sha256": "", "bytes": 0} == {
        "name": f"{REF}:Q4_K_M",
        "path": "",
        "bytes": 0,
        "sha256": "",
        "source": f"quantized:{REF}",
        "revision": hub.repos[REF].commit,
    }
    # q and k are read in units of heads, some of which are read twice.
    assert (
        weight_bytes(folder)
        <= requested_bytes(hub)
        <= 1.1 * weight_bytes(folder) + ADVANCE_BYTES + SAMPLE_BYTES
    )
    assert "in parts from the hub" in result.err
    assert "the sha256 of 3 of 3 safetensors is the hub's\n" in result.err


def test_the_manifest_is_the_same_as_after_a_download(hub: Hub, llmcli: Llmcli, home: Path) -> None:
    remote = json_output(llmcli("pull", REF, "--q4_k_m", "--json"))
    remote_manifest = json.loads((Path(remote["path"]).parent / "manifest.json").read_text())
    assert remote_manifest["settings"]["sha256_unchecked"] == []
    checked = remote_manifest["settings"]["sha256_checked"]
    assert {"config.json", *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))} <= {
        *checked
    }
    assert llmcli("rm", REF).code == 0
    downloaded = json_output(llmcli("pull", REF, "--q4_k_m", "--keep-source", "--json"))
    assert downloaded == remote
    manifest = json.loads((Path(downloaded["path"]).parent / "manifest.json").read_text())
    assert manifest["settings"]["source_sha256"] == remote_manifest["settings"]["source_sha256"]
    assert {key: manifest[key] for key in manifest.keys() - {"settings", "created", "files"}} == {
        key: remote_manifest[key]
        for key in remote_manifest.keys() - {"settings", "created", "files"}
    }
    assert any(
        path.stat().st_size > 1 << 20 for path in (home / "huggingface").rglob("*.safetensors")
    )


def test_a_pulled_model_makes_no_request_under_any_of_its_names(hub: Hub, llmcli: Llmcli) -> None:
    model = json_output(llmcli("pull", REF, "--q4_k_m", "--json"))
    hub.requests.clear()
    for words in (
        ("pull", REF, "--q4_k_m"),
        ("pull", f"{REF}:Q4_K_M"),
        ("pull", REF, "--q4_k_m", "--offline"),
        ("show", f"{REF}:Q4_K_M"),
        ("show", REF),
    ):
        assert json_output(llmcli(*words, "--json"))["path"] == model["path"]
    (row,) = json_output(llmcli("list", "--json"))
    assert (row["name"], row["path"], row["revision"]) == (
        f"{REF}:Q4_K_M",
        model["path"],
        model["revision"],
    )
    answer = json_output(llmcli("run", REF, "Once", "-n", "2", "-t", "1", "--json"))
    assert answer["model"]["path"] == model["path"]
    assert hub.requests == []


def test_another_type_is_quantized_from_the_checkpoint(
    hub: Hub, llmcli: Llmcli, folder: Path, tmp_path: Path
) -> None:
    json_output(llmcli("pull", REF, "--q4_k_m", "--json"))
    other = json_output(
        llmcli("run", REF, "Once", "--quant", "q8_0", "-n", "1", "-t", "1", "--json")
    )
    assert other["model"]["file_type"] == "Q8_0"
    direct = tmp_path / "direct.gguf"
    assert llmcli("quantize", str(folder), "--q8_0", "-o", str(direct)).code == 0
    assert tensors(Path(other["model"]["path"])) == tensors(direct)


def test_offline_a_checkpoint_that_is_not_on_this_disk_raises_an_error(
    hub: Hub, llmcli: Llmcli
) -> None:
    result = llmcli("pull", REF, "--q4_k_m", "--offline")
    assert (result.code, hub.requests) == (1, [])
    assert "llmcli is offline" in result.err
    commit = json_output(llmcli("pull", REF, "--q4_k_m", "--json"))["revision"]
    result = llmcli("pull", REF, "--revision", commit, "--offline")
    assert result.code == 1
    assert (
        "only a part of org/grown is in the Hugging Face cache (model-00001-of-00003.safetensors is missing)"
        in result.err
    )


def test_the_disk_needs_space_only_for_the_output(
    hub: Hub, expected: bytes, llmcli: Llmcli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=len(expected)))
    assert weight_bytes(folder) > 2 * len(expected)
    assert (
        Path(json_output(llmcli("pull", REF, "--q4_k_m", "--json"))["path"]).read_bytes()
        == expected
    )
    assert llmcli("rm", REF).code == 0
    result = llmcli("pull", REF, "--q4_k_m", "--keep-source")
    assert result.code == 1
    assert "not enough disk" in result.err


def test_without_range_support_the_checkpoint_is_downloaded_after_a_note(
    hub: Hub, expected: bytes, llmcli: Llmcli, folder: Path
) -> None:
    hub.ignore_range = True
    result = llmcli("pull", REF, "--q4_k_m", "--json")
    assert Path(json_output(result)["path"]).read_bytes() == expected
    assert (
        "does not send parts of model-00001-of-00003.safetensors (status 200): downloading the whole"
        in result.err
    )
    assert json_output(llmcli("show", REF, "--json"))["bytes"] > weight_bytes(folder)


def test_the_token_is_sent_only_to_the_hub_and_expired_addresses_are_renewed(
    hub: Hub, expected: bytes, llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REF].token, hub.redirects = "secret", True
    monkeypatch.setenv("HF_TOKEN", "secret")
    for lasting in (True, False):
        hub.lasting = lasting
        hub.requests.clear()
        hub.elsewhere.clear()
        model = json_output(llmcli("pull", REF, "--q4_k_m", "--force", "--json"))
        assert Path(model["path"]).read_bytes() == expected
        assert hub.elsewhere
        assert {token for _, _, token in hub.elsewhere} == {None}
        n_requests = len(requested_ranges(hub))  # to the hub, not to the host it redirects to
        assert n_requests < 30 if lasting else n_requests > 60
        assert llmcli("rm", REF).code == 0


@pytest.mark.parametrize(
    ("access", "message"), [({"gated": True}, "is gated"), ({"token": "x"}, "no public model")]
)
def test_an_inaccessible_repository_has_the_same_error_as_for_a_download(
    hub: Hub, llmcli: Llmcli, folder: Path, access, message
) -> None:
    hub.add(REF, folder, **access)
    result = llmcli("pull", REF, "--q4_k_m")
    assert result.code == 1
    assert message in result.err


def test_an_interrupted_pull_resumes_without_requesting_finished_tensors(
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
    with Hub() as other:  # reads that had begun may still request from the first hub
        other.add(REF, folder)
        monkeypatch.setenv("HF_ENDPOINT", other.url)
        result = llmcli("pull", REF, "--q4_k_m", "--json")
        assert Path(json_output(result)["path"]).read_bytes() == expected
        assert "resumed an earlier run" in result.err
        assert requested_bytes(other) < 0.7 * weight_bytes(folder)


def test_a_pull_resumes_after_the_hub_has_failed(hub: Hub, expected: bytes, llmcli: Llmcli) -> None:
    class Failing(list):  # type: ignore[type-arg]
        def append(self, request: object) -> None:
            super().append(request)
            hub.status = 503 if len(self) > 115 else None

    hub.requests = Failing()
    result = llmcli("pull", REF, "--q4_k_m")
    assert result.code == 1
    assert "the hub failed with status 503" in result.err
    hub.requests, hub.status = [], None
    again = llmcli("pull", REF, "--q4_k_m", "--json")
    assert Path(json_output(again)["path"]).read_bytes() == expected
    assert "resumed an earlier run" in again.err


def test_a_file_that_changes_on_the_hub_raises_an_error(
    hub: Hub, llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, repo = _Lines.advance, hub.repos[REF]

    def change(bar: _Lines, amount: int) -> None:
        if "quantize" in bar.label:
            name = "model-00002-of-00003.safetensors"
            repo.files[name] = repo.files[name][:-1] + b"\1"
        advance(bar, amount)

    monkeypatch.setattr(_Lines, "advance", change)
    result = llmcli("pull", REF, "--q4_k_m")
    assert result.code == 1
    assert "model-00002-of-00003.safetensors of org/grown has changed since" in result.err


def test_quantize_and_convert_read_a_remote_checkpoint(
    hub: Hub, folder: Path, expected: bytes, llmcli: Llmcli, tmp_path: Path, home: Path
) -> None:
    out = tmp_path / "out.gguf"
    plan = json_output(llmcli("quantize", REF, "--q4_k_m", "-o", str(out), "--dry-run", "--json"))
    assert (plan["bytes"], requested_bytes(hub) < ADVANCE_BYTES + SAMPLE_BYTES) == (
        len(expected),
        True,
    )
    assert json_output(llmcli("quantize", REF, "--q4_k_m", "--dry-run", "--json"))["bytes"] == len(
        expected
    )
    assert not list(home.rglob("*Q4_K_M*"))
    assert llmcli("quantize", REF, "--q4_k_m", "-o", str(out)).code == 0
    assert out.read_bytes() == expected
    assert llmcli("convert", REF, "-o", str(tmp_path / "c.gguf")).code == 0
    assert llmcli("convert", str(folder), "-o", str(tmp_path / "d.gguf")).code == 0
    assert tensors(tmp_path / "c.gguf") == tensors(tmp_path / "d.gguf")


def test_rm_deletes_the_small_files_and_gc_an_unfinished_quantization(
    hub: Hub, llmcli: Llmcli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("--q4_k_m", "--q8_0"):
        json_output(llmcli("pull", REF, kind, "--json"))
    blobs = home / "huggingface" / "hub" / "models--org--grown" / "blobs"
    n_blobs = len(list(blobs.iterdir()))
    assert n_blobs >= 4
    assert llmcli("rm", f"{REF}:Q8_0").code == 0
    assert len(list(blobs.iterdir())) == n_blobs  # the other quantization needs them
    assert llmcli("rm", REF).code == 0
    assert not blobs.exists() or not list(blobs.iterdir())
    assert json_output(llmcli("list", "--json")) == []
    with monkeypatch.context() as patch:
        patch.setattr(_Lines, "advance", lambda bar, _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert llmcli("pull", REF, "--q4_k_m").code == 130
    assert llmcli("gc").code == 0
    assert not list((home / "data" / "models").rglob("*.part"))


def flip_byte(hub: Hub, shard: str = "model-00002-of-00003.safetensors") -> None:
    """Let the hub send a shard with one other byte."""
    repo = hub.repos[REF]
    data = bytearray(repo.files[shard])
    data[len(data) // 2] ^= 1
    repo.served[shard] = bytes(data)


@pytest.mark.parametrize("words", [("pull", REF), ("quantize", REF, "-o", "out.gguf")])
def test_a_flipped_byte_of_the_weights_raises_an_error_and_leaves_no_file(
    words: tuple[str, ...],
    hub: Hub,
    expected: bytes,
    llmcli: Llmcli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    flip_byte(hub)
    result = llmcli(*words, "--q4_k_m")
    assert result.code == 1
    assert (
        "error: model-00002-of-00003.safetensors of org/grown was changed on its way: it does not "
        "match its digest on the hub\n"
    ) in result.err
    assert not [path for path in tmp_path.rglob("*.gguf*") if path.is_file()]
    hub.repos[REF].served.clear()
    result = llmcli(*words, "--q4_k_m", "--json")
    assert "resumed" not in result.err
    assert Path(json_output(result)["path"]).read_bytes() == expected


def test_a_flipped_byte_leaves_no_shard_of_the_output(
    hub: Hub, llmcli: Llmcli, tmp_path: Path
) -> None:
    flip_byte(hub)
    out = str(tmp_path / "out.gguf")
    result = llmcli("quantize", REF, "--q4_k_m", "-o", out, "--split-max-size", "3M")
    assert result.code == 1
    assert "was changed on its way" in result.err
    assert not [path for path in tmp_path.rglob("*.gguf*") if path.is_file()]


def test_bytes_that_cannot_wait_in_memory_are_read_twice(
    hub: Hub, expected: bytes, llmcli: Llmcli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_check.WaitingBytes.__init__, "__defaults__", (1 << 20,))
    result = llmcli("pull", REF, "--q4_k_m", "--json")
    assert Path(json_output(result)["path"]).read_bytes() == expected
    assert "the sha256 of 3 of 3 safetensors is the hub's; " in result.err
    assert "were read a second time for that" in result.err
    assert requested_bytes(hub) > 1.2 * weight_bytes(folder)


def test_a_resumed_pull_says_which_files_were_not_checked(
    hub: Hub, expected: bytes, llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, advance = iter(range(20)), _Lines.advance

    def stop(bar: _Lines, amount: int) -> None:
        if "quantize" in bar.label and next(count, None) is None:
            raise KeyboardInterrupt
        advance(bar, amount)

    with monkeypatch.context() as patch:
        patch.setattr(_Lines, "advance", stop)
        assert llmcli("pull", REF, "--q4_k_m").code == 130
    result = llmcli("pull", REF, "--q4_k_m", "--json")
    model = json_output(result)
    assert Path(model["path"]).read_bytes() == expected
    settings = json.loads(Path(model["path"]).with_name("manifest.json").read_text())["settings"]
    unchecked = settings["sha256_unchecked"]
    assert 0 < len(unchecked) < 3
    assert f"the sha256 of {3 - len(unchecked)} of 3 safetensors is the hub's" in result.err
    assert f"an earlier run had read a part: {', '.join(unchecked)}\n" in result.err


def test_a_checkpoint_in_the_cache_is_quantized_if_the_hub_does_not_answer(
    hub: Hub, expected: bytes, llmcli: Llmcli, home: Path
) -> None:
    json_output(llmcli("pull", REF, "--keep-source", "--json"))
    shutil.rmtree(home / "data")
    hub.status = 503
    result = llmcli("pull", REF, "--q4_k_m", "--json")
    assert Path(json_output(result)["path"]).read_bytes() == expected
    assert "failed with status 503; using org/grown from the Hugging Face cache" in result.err
    result = llmcli("pull", REF, "--q4_k_m", "--force")
    assert (result.code, "error: the hub failed with status 503" in result.err) == (1, True)
