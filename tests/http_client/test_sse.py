"""Server-sent events in any pieces, and what their chunks say."""

import pytest

from llmcli.http_client import sse

WHOLE = b'data: {"a": 1}\n\n: a comment\n\ndata: {"b":\ndata: 2}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_the_same_in_whatever_pieces_they_come(size: int, ends: bytes) -> None:
    events, sent = sse.EventDecoder(), WHOLE.replace(b"\n", ends)
    found = [data for at in range(0, len(sent), size) for data in events.feed(sent[at : at + size])]
    assert found == [b'{"a": 1}', b'{"b":\n2}', b"[DONE]"]


def test_what_is_no_stream_of_objects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        with pytest.raises(sse.BadStreamError):
            sse.parse_event(data)
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(sse.BadStreamError, match="does not end"):
        list(sse.EventDecoder().feed(b"x" * 101))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, (0, None)),
        ({"delta": {"content": "a"}}, (1, None)),
        ({"delta": {"reasoning_content": "a"}}, (1, None)),
        ({"delta": {"tool_calls": [{"index": 0}]}}, (1, None)),
        ({"delta": {"content": "a b"}, "token_ids": [5, 6]}, (2, None)),
        ({"delta": {"content": "a b c"}, "logprobs": {"content": [{}, {}, {}]}}, (3, None)),
        ({"text": "a", "finish_reason": "stop"}, (1, "stop")),
        ({"delta": {}, "finish_reason": "length"}, (0, "length")),
        ({"delta": None, "finish_reason": 7, "logprobs": 3}, (0, None)),
    ],
)
def test_tokens_of_a_chunk_are_counted_by_ids_where_it_tells_them(
    choice: object, expected: object
) -> None:
    assert sse.count_tokens({"choices": [choice]}) == expected


def test_usage_and_errors_are_read_and_nonsense_is_nothing() -> None:
    told = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert sse.read_usage({"usage": told}) == sse.TokenUsage(9, 3, 8)
    assert sse.read_usage(
        {"usage": {"prompt_tokens": -1, "completion_tokens": "3"}}
    ) == sse.TokenUsage(None, None, None)
    assert sse.read_usage({"usage": None}) is None
    assert sse.read_error_message({"error": {"message": "too long"}}) == "too long"
    assert sse.read_error_message({"error": "gone"}) == "gone"
    assert sse.read_error_message({}) == ""
    assert sse.count_tokens({"choices": []}) == sse.count_tokens({"choices": [3]}) == (0, None)
