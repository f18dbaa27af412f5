"""RemoteFile: reads ranges of a file on a fake hub that breaks, redirects or sends wrong ranges."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from llmcli.catalog.hub import content_check, exchange, retry
from llmcli.catalog.hub.choose_files import HubFile
from llmcli.catalog.hub.range_reader import RangesUnsupported, RemoteFile, fetch_heads
from llmcli.catalog.spec import Spec
from llmcli.config import load_config
from llmcli.errors import UserError
from tests.fixtures.fake_hub import Faults, Hub, _Handler, sha256
from tests.fixtures.hub import Notes

REPO, NAME = "org/repo", "model.safetensors"
DATA = random.Random(0).randbytes(512_000)
BLOCK = content_check.BLOCK_BYTES


@pytest.fixture
def open_remote(
    hub: Hub, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], RemoteFile]:
    """Return a function that opens the file on the hub with the current configuration."""
    repo = hub.add(REPO, {NAME: DATA})
    blob = HubFile(NAME, len(DATA), sha256(DATA))
    return lambda: RemoteFile(Spec("hub", repo=REPO), repo.commit, blob, load_config(), notes)


def change_ranges(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[_Handler, dict[str, str], bytes], Any]
) -> None:
    """Let `change` modify the headers and the body of every response with a range."""
    reply = _Handler.reply

    def changed_reply(
        self: _Handler, status: int, body: bytes, headers: dict[str, str], breakable: bool = False
    ) -> None:
        if status == 206:
            body = change(self, headers, body) or body
        reply(self, status, body, headers, breakable)

    monkeypatch.setattr(_Handler, "reply", changed_reply)


def test_a_read_returns_the_bytes_and_requests_whole_blocks(hub, open_remote) -> None:
    file = open_remote()
    for offset, nbytes in ((0, 1), (9000, 5000), (len(DATA) - 7, 7), (0, len(DATA))):
        data = file.read(offset, nbytes)
        assert data.tobytes() == DATA[offset : offset + nbytes]
        assert data.ctypes.data % 64 == 0
    assert hub.gets(NAME)[1] == f"bytes={BLOCK}-{2 * BLOCK - 1}"
    fetch_heads([file])
    n_requests = len(hub.gets(NAME))
    assert file.read(8, 1000).tobytes() == DATA[8:1008]
    assert len(hub.gets(NAME)) == n_requests  # the first bytes were read in advance


def test_a_broken_response_is_resumed_where_it_ended(hub, open_remote, notes) -> None:
    hub.cuts = [1000, 0, 3000]
    assert open_remote().read(0, 12 * BLOCK).tobytes() == DATA[: 12 * BLOCK]
    last = 12 * BLOCK - 1
    assert hub.gets(NAME) == [f"bytes={start}-{last}" for start in (0, 1000, 1000, 4000)]
    assert notes.lines == [f"a connection broke in {NAME}; resuming, with retries"]


def test_reads_succeed_although_half_of_the_responses_fail(hub, open_remote, monkeypatch) -> None:
    # On a busy machine this is sometimes too short. The request is then repeated.
    monkeypatch.setattr(exchange, "TIMEOUT_SECONDS", 0.5)
    hub.faults = Faults(3, share=0.5)
    hub.faults.random.choice = lambda kinds: "cut" if len(hub.faults.happened) % 4 else "stall"
    file = open_remote()
    for offset in range(0, 400_000, 40_000):
        assert file.read(offset, 4000).tobytes() == DATA[offset : offset + 4000]
    assert len(hub.faults.happened) > 5


def test_a_server_that_sends_nothing_raises_an_error_after_several_requests(
    hub, open_remote
) -> None:
    hub.cuts = [0] * retry.MAX_FAILURES
    with pytest.raises(UserError, match="no connection to http://127"):
        open_remote().read(0, 10)
    assert len(hub.gets(NAME)) == retry.MAX_FAILURES


def test_a_retry_waits_as_long_as_the_hub_asks(hub, open_remote, notes, monkeypatch) -> None:
    pauses: list[float] = []

    def record_pause(seconds: float) -> None:
        pauses.append(seconds)
        hub.status = None

    def fail_with_pause(self: _Handler, status: int, code: str, message: str) -> None:
        self.reply(status, b"", {"Retry-After": "42"})

    monkeypatch.setattr(retry.time, "sleep", record_pause)
    monkeypatch.setattr(_Handler, "fail", fail_with_pause)
    file = open_remote()
    file.read(0, 10)
    hub.status = 429
    assert file.read(50_000, 10).tobytes() == DATA[50_000:50_010]
    assert pauses == [42]
    assert "too many requests; waiting 42 s" in notes.lines[0]
    hub.status = 429  # before the first byte, the user is not made to wait that long
    with pytest.raises(UserError, match="answers with status 429, and asks to wait 42 seconds"):
        open_remote().read(0, 10)


def test_a_server_that_ignores_ranges_raises_ranges_unsupported(hub, open_remote) -> None:
    hub.ignore_range = True
    with pytest.raises(
        RangesUnsupported,
        match=r"127.0.0.1 does not send parts of model.safetensors \(status 200\)",
    ):
        fetch_heads([open_remote()])


def test_status_416_raises_ranges_unsupported(hub, open_remote) -> None:
    hub.repos[REPO].served[NAME] = b""
    with pytest.raises(RangesUnsupported, match="status 416"):
        open_remote().read(10, 10)


def test_a_longer_range_is_cut_off_and_another_range_raises_an_error(
    hub, open_remote, monkeypatch
) -> None:
    change_ranges(monkeypatch, lambda handler, headers, body: body + b"more")
    assert open_remote().read(10, 10).tobytes() == DATA[10:20]
    change_ranges(
        monkeypatch,
        lambda handler, headers, body: headers.update({"Content-Range": f"bytes 8-17/{len(DATA)}"}),
    )
    with pytest.raises(UserError, match="another range than requested"):
        open_remote().read(10, 10)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Linked-Etag": '"0000"'},
        {"X-Repo-Commit": "0" * 40},
        {"Content-Range": f"bytes 0-{BLOCK - 1}/{len(DATA) + 1}"},
    ],
)
def test_a_range_of_another_file_raises_an_error(hub, open_remote, monkeypatch, headers) -> None:
    change_ranges(monkeypatch, lambda handler, sent, body: sent.update(headers))
    with pytest.raises(UserError, match=f"{NAME} of {REPO} has changed since"):
        open_remote().read(10, 10)


def test_an_etag_that_changes_between_two_ranges_raises_an_error(
    hub, open_remote, monkeypatch
) -> None:
    file, etags = open_remote(), iter(['"a"', '"a"', '"b"'])
    change_ranges(monkeypatch, lambda handler, sent, body: sent.update({"ETag": next(etags)}))
    file.read(10, 10)
    file.read(50_000, 10)
    with pytest.raises(UserError, match="has changed since"):
        file.read(100_000, 10)


@pytest.mark.parametrize(
    "content_range",
    [
        f"bytes {'1' * 5000}-19/{len(DATA)}",
        f"bytes 0-19/{'9' * 5000}",
        "bytes ٠-19/512000",
        "bytes */512000",
    ],
)
def test_an_invalid_content_range_raises_an_error(
    hub, open_remote, monkeypatch, content_range
) -> None:
    change_ranges(
        monkeypatch, lambda handler, headers, body: headers.update({"Content-Range": content_range})
    )
    monkeypatch.setattr(_Handler, "send_header", _send_utf8_header)
    with pytest.raises(UserError, match=r"another range|has changed"):
        open_remote().read(10, 10)


def _send_utf8_header(handler: _Handler, name: str, value: str) -> None:
    """Send a header in UTF-8, which the server of the standard library cannot do."""
    handler._headers_buffer.append(f"{name}: {value}\r\n".encode())


@pytest.mark.parametrize("retry_after", ["²", "-1", "1e999", "soon"])
def test_an_invalid_pause_is_not_waited_for(hub, open_remote, monkeypatch, retry_after) -> None:
    pauses: list[float] = []

    def record_pause(seconds: float) -> None:
        pauses.append(seconds)
        hub.status = None

    monkeypatch.setattr(retry.time, "sleep", record_pause)
    monkeypatch.setattr(
        _Handler, "fail", lambda self, *_: self.reply(429, b"", {"Retry-After": retry_after})
    )
    hub.status = 429
    assert open_remote().read(0, 10).tobytes() == DATA[:10]
    assert max(pauses) <= 8


def test_a_pause_that_is_too_long_raises_an_error(hub, open_remote, monkeypatch) -> None:
    monkeypatch.setattr(
        _Handler, "fail", lambda self, *_: self.reply(429, b"", {"Retry-After": "86400"})
    )
    file = open_remote()
    file.read(0, 10)
    hub.status = 429
    with pytest.raises(UserError, match="asks to wait 86400 seconds") as raised:
        file.read(50_000, 10)
    assert "it resumes" in raised.value.hint


def test_reads_reuse_a_connection(hub, open_remote, monkeypatch) -> None:
    connections: list[object] = []
    setup = _Handler.setup
    monkeypatch.setattr(
        _Handler, "setup", lambda self: (connections.append(self.client_address), setup(self))
    )
    file = open_remote()
    for number in range(20):
        file.read(number * BLOCK, BLOCK)
    assert len(hub.gets(NAME)) == 20
    assert len(connections) <= 2
