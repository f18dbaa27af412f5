"""Downloads from the hub through fetch_model: resuming, verification and the cache."""

import errno
import shutil
from pathlib import Path

import pytest

from llmcli.catalog import fetch
from llmcli.catalog.hub import cache, exchange, listing, retry
from llmcli.config import load_config
from llmcli.errors import UserError
from tests.catalog.conftest import REPO, checkpoint_files
from tests.fixtures.fake_hub import _Handler
from tests.fixtures.hub_faults import Fault


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


@pytest.fixture
def impatient(monkeypatch):
    """Short limits of time, for servers that send nothing or little."""
    monkeypatch.setattr(exchange, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(exchange, "REPLY_SECONDS", 0.3)
    monkeypatch.setattr(exchange, "PROGRESS_SECONDS", 0.8)
    monkeypatch.setattr(listing, "LISTING_SECONDS", 0.8)


def cached_files() -> dict[str, int]:
    """Return the sizes of the files in the cache that are neither links nor locks, by name."""
    folder = load_config().hub_cache
    return {
        path.name: path.stat().st_size
        for path in folder.glob("models--*/**/*")
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize("body", ["endless", "endless-chunked", "longer-unannounced"])
def test_bytes_beyond_the_listed_size_are_not_written(gguf_hub, gguf, notes, body):
    gguf_hub.misbehave("weights", Fault(body=body))
    sizes = []
    notes.on_advance = lambda _: sizes.append(max(cached_files().values()))
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert max(sizes) <= len(gguf)
    assert sum("sends more than the" in line for line in notes.lines) == 1


def test_an_endless_body_with_wrong_bytes_is_deleted(gguf_hub, gguf, notes):
    gguf_hub.repos[REPO].served["tiny-Q4_K_M.gguf"] = b"X" * len(gguf)
    gguf_hub.misbehave("weights", Fault(body="endless"))
    with pytest.raises(UserError, match="does not match its digest on the hub"):
        fetch.fetch_model(REPO, load_config(), notes)
    assert cached_files() == {}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(body="longer"), r"sends \d+ bytes of tiny-Q4_K_M.gguf instead of the \d+ that"),
        (Fault(body="shorter"), r"sends \d+ bytes of tiny-Q4_K_M.gguf instead of"),
        (Fault(body="page"), r"sends \d+ bytes of tiny-Q4_K_M.gguf instead of"),
        (Fault(body="gzip-bomb"), r"sends \d+ bytes of tiny-Q4_K_M.gguf instead of"),
        (Fault(body="gzip", headers={"Content-Length": None}), "sends a compressed body"),
        (Fault(body="gzip-bomb", headers={"Content-Length": None}), "sends a compressed body"),
        (Fault(redirect="loop"), "127.0.0.1 redirects more than 5 times"),
        (Fault(redirect="long"), "127.0.0.1 redirects more than 5 times"),
        (Fault(redirect="endless"), "127.0.0.1 redirects more than 5 times"),
        (Fault(redirect="nowhere"), "the hub failed with status 302"),
        (Fault(redirect="scheme"), "127.0.0.1 redirects to what is not a web address"),
        (Fault(redirect="port"), "no connection to "),
        (Fault(redirect="garbage"), "127.0.0.1 redirects to what is not an address"),
        (Fault(redirect="dead"), "no connection to "),
        (Fault(status=206), "the hub failed with status 206"),
        (Fault(status=204), "the hub failed with status 204"),
        (Fault(status=418), "the hub failed with status 418"),
    ],
    ids=lambda value: value.label if isinstance(value, Fault) else "",
)
def test_a_fault_of_the_server_is_one_line(gguf_hub, gguf, notes, fault, message):
    gguf_hub.misbehave("weights", fault)
    with pytest.raises(UserError, match=message) as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert raised.value.hint
    assert "\n" not in str(raised.value)
    assert sum(cached_files().values()) < len(gguf)


@pytest.mark.parametrize(
    "pace", ["silent", "informational", "drip-headers", "drip-body", "drip-chunk"]
)
@pytest.mark.parametrize("kind", ["listing", "weights"])
def test_a_server_that_stalls_is_one_line(gguf_hub, notes, impatient, kind, pace):
    gguf_hub.drip_seconds = 0.02
    gguf_hub.misbehave(kind, Fault(pace=pace))
    with pytest.raises(
        UserError, match=r"has sent only \d+ bytes in|no byte in|timed out"
    ) as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert "the download resumes" in raised.value.hint


def test_a_stall_again_and_again_ends(gguf_hub, gguf, notes, impatient, monkeypatch):
    # Each request receives half of what is missing, until that is little.
    monkeypatch.setattr(exchange, "PROGRESS_BYTES", len(gguf))
    gguf_hub.misbehave("weights", Fault(pace="half"))
    with pytest.raises(UserError, match=r"has sent only [\d,]+ bytes in 0.8 seconds") as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert "the download resumes" in raised.value.hint
    (partial,) = cached_files().items()
    assert partial[0].endswith(".llmcli.incomplete")
    assert 0 < partial[1] < len(gguf)
    gguf_hub.misbehavior.clear()
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert gguf_hub.gets("tiny-Q4_K_M.gguf")[-1] == f"bytes={partial[1]}-"


def test_a_server_that_falls_silent_too_often_raises_an_error(
    gguf_hub, notes, impatient, monkeypatch
):
    monkeypatch.setattr(exchange, "PROGRESS_BYTES", 1)
    gguf_hub.misbehave("weights", Fault(pace="half"))
    with pytest.raises(UserError, match="the server fell silent 4 times in a row") as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert "the download resumes" in raised.value.hint
    assert len(gguf_hub.gets("tiny-Q4_K_M.gguf")) == 4


def test_a_server_that_falls_silent_seldom_is_resumed(
    gguf_hub, gguf, notes, impatient, monkeypatch
):
    monkeypatch.setattr(exchange, "PROGRESS_BYTES", 1)
    monkeypatch.setattr(retry, "STALL_BYTES", 1)
    gguf_hub.misbehave("weights", Fault(pace="half", times=7))
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf


def test_another_range_than_requested_is_not_appended(gguf_hub, gguf, notes, monkeypatch):
    gguf_hub.cuts = [1000]
    reply = _Handler.reply

    def send_another_range(self, status, body, headers, breakable=False):
        if status == 206:
            headers["Content-Range"] = f"bytes 0-{len(gguf) - 1001}/{len(gguf)}"
        reply(self, status, body, headers, breakable)

    monkeypatch.setattr(_Handler, "reply", send_another_range)
    with pytest.raises(UserError, match=r"instead of the \d+ that the hub lists"):
        fetch.fetch_model(REPO, load_config(), notes)


def test_a_host_that_refuses_a_range_sends_the_complete_file(gguf_hub, gguf, notes, monkeypatch):
    gguf_hub.cuts = [1000]
    reply = _Handler.reply

    def refuse_ranges(self, status, body, headers, breakable=False):
        reply(self, 416 if status == 206 else status, body, headers, breakable)

    monkeypatch.setattr(_Handler, "reply", refuse_ranges)
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert gguf_hub.gets("tiny-Q4_K_M.gguf") == [None, "bytes=1000-", None]


def forget_models() -> None:
    """Remove the manifests, so that a model is looked for in the Hugging Face cache."""
    shutil.rmtree(load_config().data)


def test_a_cache_without_links_is_recognized(gguf_hub, gguf, notes, monkeypatch):
    from huggingface_hub import constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    ours = fetch.fetch_model(REPO, load_config(), notes).path
    assert not ours.is_symlink()
    assert ours.read_bytes() == gguf
    assert len(cached_files()) == 2  # the file and the commit of the branch
    theirs = hf_hub_download(
        REPO,
        "tiny-Q8_0.gguf",
        cache_dir=load_config().hub_cache,
        endpoint=gguf_hub.url,
        token=False,
    )
    assert not Path(theirs).is_symlink()
    forget_models()
    gguf_hub.requests.clear()
    for quant in ("Q4_K_M", "Q8_0"):
        fetch.fetch_model(f"{REPO}:{quant}", load_config(), notes)
    assert gguf_hub.gets("tiny-Q4_K_M.gguf") == gguf_hub.gets("tiny-Q8_0.gguf") == []


def test_equal_files_are_copied_where_links_cannot_be_created(hub, gguf, notes, monkeypatch):
    def refuse(self, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    names = [f"big-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.add(REPO, dict.fromkeys(names, gguf))
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert [(model.path.parent / name).read_bytes() for name in names] == [gguf, gguf]


def test_a_complete_cache_is_used_without_writing(gguf_hub, gguf, notes, monkeypatch):
    fetch.fetch_model(REPO, load_config(), notes)
    forget_models()
    before = {path: path.lstat().st_mtime_ns for path in load_config().hub_cache.rglob("*")}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert before == {path: path.lstat().st_mtime_ns for path in load_config().hub_cache.rglob("*")}


def test_a_commit_that_cannot_be_recorded_is_noted(gguf_hub, gguf, notes, monkeypatch):
    fetch.fetch_model(REPO, load_config(), notes)
    forget_models()
    (ref,) = load_config().hub_cache.glob("models--*/refs/main")
    ref.write_text("0" * 40)

    def refuse(path, data):
        raise UserError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr(cache, "write_atomically", refuse)
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    commit = gguf_hub.repos[REPO].commit
    assert any(f"will be found only as commit {commit}" in line for line in notes.lines)


def test_a_cache_that_cannot_be_written_has_a_hint(gguf_hub, gguf, notes, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    fetch.fetch_model(REPO, load_config(), notes)
    gguf_hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf, "new": b""})
    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(UserError, match="Read-only file system") as raised:
        fetch.fetch_model(REPO, load_config(), notes, force=True)
    assert "--offline" in raised.value.hint


def test_a_download_marks_the_cache_for_backup_programs(gguf_hub, notes):
    fetch.fetch_model(REPO, load_config(), notes)
    tag = load_config().hub_cache / "CACHEDIR.TAG"
    assert tag.read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
