"""Downloads from the hub through fetch_model: resuming, verification and the cache."""

from pathlib import Path

import pytest

from llmcli.catalog import fetch
from llmcli.config import load_config
from llmcli.errors import UserError
from tests.catalog.conftest import REPO, checkpoint_files


def test_huggingface_hub_finds_a_downloaded_file_in_its_cache(gguf_hub, gguf, notes):
    from huggingface_hub import hf_hub_download, scan_cache_dir

    fetch.fetch_model(REPO, load_config(), notes)
    path = hf_hub_download(
        REPO, "tiny-Q4_K_M.gguf", cache_dir=load_config().hub_cache, local_files_only=True
    )
    assert Path(path).read_bytes() == gguf
    cache = scan_cache_dir(load_config().hub_cache)
    assert [repo.repo_id for repo in cache.repos] == [REPO]
    assert not cache.warnings


def test_a_broken_connection_is_resumed_where_it_broke(gguf_hub, gguf, notes):
    gguf_hub.cuts = [1000, 2000]
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.path.read_bytes() == gguf
    assert gguf_hub.gets("tiny-Q4_K_M.gguf") == [None, "bytes=1000-", "bytes=3000-"]
    assert any("resuming" in line for line in notes.lines)


def test_a_redirected_download_is_resumed_and_sends_the_token_only_to_the_hub(
    hub, gguf, notes, monkeypatch
):
    repo = hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf}, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.redirects, hub.cuts = True, [1000, 2000]
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.path.read_bytes() == gguf
    assert model.revision == repo.commit
    ranges = [None, "bytes=1000-", "bytes=3000-"]
    assert (
        hub.gets("tiny-Q4_K_M.gguf") == ranges
    )  # after each break, the hub is asked for a new address
    assert hub.elsewhere == [("GET", range_header, None) for range_header in ranges]


def test_an_error_of_the_host_to_which_the_hub_redirects_names_that_host(
    hub, gguf, notes, monkeypatch
):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    hub.redirects = True
    # A dict that stores nothing, so that the other host rejects every address.
    monkeypatch.setattr(hub, "signed", type("Empty", (dict,), {"__setitem__": lambda *_: None})())
    with pytest.raises(
        UserError,
        match=f"localhost, to which the hub redirects for {REPO}, answers with status 403",
    ):
        fetch.fetch_model(REPO, load_config(), notes)


def test_an_unreachable_host_to_which_the_hub_redirects_is_named(hub, gguf, notes, monkeypatch):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    hub.redirects = True
    monkeypatch.setattr(hub, "sign", lambda *_: "http://localhost:1/blob")
    with pytest.raises(UserError, match="no connection to localhost: "):
        fetch.fetch_model(REPO, load_config(), notes)


def test_an_interrupted_download_is_resumed_by_the_next_command(gguf_hub, gguf, notes):
    def stop(_):
        raise KeyboardInterrupt

    notes.on_advance = stop
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_model(REPO, load_config(), notes)
    (partial,) = load_config().hub_cache.glob("models--*/blobs/*.llmcli.incomplete")
    size = partial.stat().st_size
    assert 0 < size < len(gguf)
    notes.on_advance = lambda _: None
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert gguf_hub.gets("tiny-Q4_K_M.gguf")[-1] == f"bytes={size}-"
    label, total, done, steps = notes.bars[-1]
    assert (label, total, done, sum(steps)) == (REPO, len(gguf), size, len(gguf) - size)
    assert not partial.exists()


def test_progress_never_decreases_if_the_server_sends_the_complete_file_again(
    gguf_hub, gguf, notes
):
    gguf_hub.ignore_range = True
    gguf_hub.cuts = [3000]
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    steps = notes.bars[0][3]
    assert min(steps) > 0
    assert sum(steps) == len(gguf)


def test_a_download_with_wrong_content_is_deleted(gguf_hub, gguf, notes):
    gguf_hub.repos[REPO].served["tiny-Q4_K_M.gguf"] = b"X" * len(gguf)
    with pytest.raises(UserError, match="does not match its digest on the hub"):
        fetch.fetch_model(REPO, load_config(), notes)
    blobs = load_config().hub_cache.glob("models--*/blobs/*")
    assert not any(path.is_file() for path in blobs)
    gguf_hub.repos[REPO].served.clear()
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf


def test_a_small_file_with_wrong_content_raises_an_error(hub, stories, notes):
    hub.add("someone/stories", checkpoint_files(stories)).served["config.json"] = b"{}" + b" " * (
        (stories / "config.json").stat().st_size - 2
    )
    with pytest.raises(
        UserError, match=r"config\.json of someone/stories does not match its digest"
    ):
        fetch.fetch_model("someone/stories", load_config(), notes)


def test_a_damaged_blob_in_the_cache_is_replaced(gguf_hub, gguf, notes):
    path = fetch.fetch_model(REPO, load_config(), notes).path
    path.resolve().write_bytes(b"X" * len(gguf))
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert any("damaged" in line for line in notes.lines)


def test_too_little_disk_space_raises_an_error_before_the_download(gguf_hub, notes, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match=r"not enough disk space: .* are needed"):
        fetch.fetch_model(REPO, load_config(), notes)
    assert gguf_hub.gets("tiny-Q4_K_M.gguf") == []
