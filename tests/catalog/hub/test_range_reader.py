"""Ranges of a file on the hub: all bytes are read, or one line says why not."""

from collections.abc import Callable
from typing import Any

import pytest

from llmcli.catalog.hub import range_reader, retry
from llmcli.catalog.hub.choose_files import HubFile
from llmcli.catalog.hub.range_reader import RangesUnsupported, RemoteFile, fetch_heads
from llmcli.catalog.spec import Spec
from llmcli.config import load_config
from llmcli.errors import UserError
from tests.fixtures.fake_hub import Faults, Hub, _Handler, sha256
from tests.fixtures.hub import Notes

REPO, NAME = "org/repo", "model.safetensors"
DATA = bytes(range(256)) * 2000


@pytest.fixture
def remote(hub: Hub, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> Callable[[], RemoteFile]:
    """The file as the configuration of now sees it."""
    repo = hub.add(REPO, {NAME: DATA})
    blob = HubFile(NAME, len(DATA), sha256(DATA))
    return lambda: RemoteFile(Spec("hub", repo=REPO), repo.commit, blob, load_config(), notes)


def answer(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[_Handler, dict[str, str], bytes], Any]
) -> None:
    """Let the hub's answers with parts be changed on their way."""
    reply = _Handler.reply

    def changed(
        self: _Handler, status: int, body: bytes, headers: dict[str, str], breakable: bool = False
    ) -> None:
        if status == 206:
            body = change(self, headers, body) or body
        reply(self, status, body, headers, breakable)

    monkeypatch.setattr(_Handler, "reply", changed)


def test_any_bytes_are_those_of_the_file_and_no_more_are_asked_for(hub, remote) -> None:
    file = remote()
    for offset, nbytes in ((0, 1), (100, 5000), (len(DATA) - 7, 7), (0, len(DATA))):
        assert file.read(offset, nbytes).tobytes() == DATA[offset : offset + nbytes]
    assert hub.gets(NAME)[1] == "bytes=100-5099"
    fetch_heads([file])
    asked = len(hub.gets(NAME))
    assert file.read(8, 1000).tobytes() == DATA[8:1008]
    assert len(hub.gets(NAME)) == asked  # the beginning is here


def test_a_broken_answer_is_gone_on_with_where_it_ended(hub, remote, notes) -> None:
    hub.cuts = [1000, 0, 3000]
    assert remote().read(50, 100_000).tobytes() == DATA[50:100_050]
    assert hub.gets(NAME) == [f"bytes={at}-100049" for at in (50, 1050, 1050, 4050)]
    assert notes.lines == [f"a connection broke in {NAME}; resuming, with retries"]


def test_half_of_all_answers_may_go_wrong(hub, remote, monkeypatch) -> None:
    # one that is too short for a busy machine is tried again
    monkeypatch.setattr(range_reader, "TIMEOUT_SECONDS", 0.5)
    hub.faults = Faults(3, share=0.5)
    hub.faults.random.choice = lambda kinds: "cut" if len(hub.faults.happened) % 4 else "stall"
    file = remote()
    for at in range(0, 40_000, 4000):
        assert file.read(at, 4000).tobytes() == DATA[at : at + 4000]
    assert len(hub.faults.happened) > 5


def test_one_that_gives_nothing_any_more_is_told_after_a_while(hub, remote) -> None:
    hub.cuts = [0] * retry.MAX_FAILURES
    with pytest.raises(UserError, match="no connection to http://127"):
        remote().read(0, 10)
    assert len(hub.gets(NAME)) == retry.MAX_FAILURES


def test_it_waits_as_long_as_the_hub_asks_for(hub, remote, notes, monkeypatch) -> None:
    waited: list[float] = []

    def patient(seconds: float) -> None:
        waited.append(seconds)
        hub.status = None

    def busy(self: _Handler, status: int, code: str, message: str) -> None:
        self.reply(status, b"", {"Retry-After": "42"})

    monkeypatch.setattr(retry.time, "sleep", patient)
    monkeypatch.setattr(_Handler, "fail", busy)
    hub.status = 429
    assert remote().read(0, 10).tobytes() == DATA[:10]
    assert waited == [42]
    assert "too many requests; waiting 42 s" in notes.lines[0]


def test_a_server_that_sends_all_of_it_gives_no_parts(hub, remote) -> None:
    hub.ignore_range = True
    with pytest.raises(
        RangesUnsupported,
        match=r"127.0.0.1 does not send parts of model.safetensors \(status 200\)",
    ):
        fetch_heads([remote()])


def test_a_server_that_refuses_a_part_that_is_there_gives_no_parts(hub, remote) -> None:
    hub.repos[REPO].served[NAME] = b""
    with pytest.raises(RangesUnsupported, match="status 416"):
        remote().read(10, 10)


def test_more_than_was_asked_for_is_cut_and_another_part_is_not_taken(
    hub, remote, monkeypatch
) -> None:
    answer(monkeypatch, lambda handler, headers, body: body + b"more")
    assert remote().read(10, 10).tobytes() == DATA[10:20]
    answer(
        monkeypatch,
        lambda handler, headers, body: headers.update({"Content-Range": f"bytes 0-9/{len(DATA)}"}),
    )
    with pytest.raises(UserError, match="another range than requested"):
        remote().read(10, 10)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Linked-Etag": '"0000"'},
        {"X-Repo-Commit": "0" * 40},
        {"Content-Range": f"bytes 10-19/{len(DATA) + 1}"},
    ],
)
def test_a_part_of_another_file_is_refused(hub, remote, monkeypatch, headers) -> None:
    answer(monkeypatch, lambda handler, sent, body: sent.update(headers))
    with pytest.raises(UserError, match=f"{NAME} of {REPO} has changed since"):
        remote().read(10, 10)


def test_an_etag_that_changes_between_two_parts_is_noticed(hub, remote, monkeypatch) -> None:
    file, tags = remote(), iter(['"a"', '"a"', '"b"'])
    answer(monkeypatch, lambda handler, sent, body: sent.update({"ETag": next(tags)}))
    file.read(10, 10)
    file.read(20, 10)
    with pytest.raises(UserError, match="has changed since"):
        file.read(30, 10)


@pytest.mark.parametrize(
    "part",
    [
        f"bytes {'1' * 5000}-19/{len(DATA)}",
        f"bytes 10-19/{'9' * 5000}",
        "bytes ١٠-19/512000",
        "bytes */512000",
    ],
)
def test_a_part_that_is_described_in_no_sensible_numbers_is_not_taken(
    hub, remote, monkeypatch, part
) -> None:
    answer(monkeypatch, lambda handler, headers, body: headers.update({"Content-Range": part}))
    monkeypatch.setattr(_Handler, "send_header", _bytes_header)
    with pytest.raises(UserError, match=r"another range|has changed"):
        remote().read(10, 10)


def _bytes_header(handler: _Handler, name: str, value: str) -> None:
    """A header in UTF-8, which the standard library's server cannot send."""
    handler._headers_buffer.append(f"{name}: {value}\r\n".encode())


@pytest.mark.parametrize("asked", ["²", "-1", "9" * 5000, "1e999", "soon"])
def test_a_strange_wait_is_not_obeyed(hub, remote, monkeypatch, asked) -> None:
    waited: list[float] = []

    def patient(seconds: float) -> None:
        waited.append(seconds)
        hub.status = None

    monkeypatch.setattr(retry.time, "sleep", patient)
    monkeypatch.setattr(
        _Handler, "fail", lambda self, *_: self.reply(429, b"", {"Retry-After": asked})
    )
    hub.status = 429
    assert remote().read(0, 10).tobytes() == DATA[:10]
    assert max(waited) <= 300


def test_parts_come_through_connections_that_are_there(hub, remote, monkeypatch) -> None:
    opened: list[object] = []
    setup = _Handler.setup
    monkeypatch.setattr(
        _Handler, "setup", lambda self: (opened.append(self.client_address), setup(self))
    )
    file = remote()
    for at in range(20):
        file.read(at * 5000, 5000)
    assert len(hub.gets(NAME)) == 20
    assert len(opened) <= 2
