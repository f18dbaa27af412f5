"""The parser of Server-Sent Events: any split of the bytes gives the same events, and data that is
not a JSON object is refused.
"""

import pytest

from llmcli.http_client import sse

STREAM = b'data: {"a": 1}\n\n: a comment\n\ndata: {"b":\ndata: 2}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_any_split_of_the_bytes_gives_the_same_events(size: int, line_end: bytes) -> None:
    decoder, stream = sse.EventDecoder(), STREAM.replace(b"\n", line_end)
    events = [
        data
        for start in range(0, len(stream), size)
        for data in decoder.feed(stream[start : start + size])
    ]
    assert events == [b'{"a": 1}', b'{"b":\n2}', b"[DONE]"]


def test_bad_json_and_endless_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        with pytest.raises(sse.BadStreamError):
            sse.parse_event(data)
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(sse.BadStreamError, match="does not end"):
        list(sse.EventDecoder().feed(b"x" * 101))
