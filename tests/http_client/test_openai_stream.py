"""Token counts and error messages in the chunks and responses of OpenAI's APIs."""

import pytest

from llmcli.http_client import openai_stream


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
def test_tokens_are_counted_by_ids_or_logprobs_if_present(choice: object, expected: object) -> None:
    assert openai_stream.count_tokens({"choices": [choice]}) == expected


def test_usage_and_errors_are_read_and_bad_fields_are_ignored() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert openai_stream.read_usage({"usage": usage}) == openai_stream.TokenUsage(9, 3, 8)
    assert openai_stream.read_usage(
        {"usage": {"prompt_tokens": -1, "completion_tokens": "3"}}
    ) == openai_stream.TokenUsage(None, None, None)
    assert openai_stream.read_usage({"usage": None}) is None
    assert openai_stream.read_error_message({"error": {"message": "too long"}}) == "too long"
    assert openai_stream.read_error_message({"error": "gone"}) == "gone"
    assert openai_stream.read_error_message({}) == ""
    assert (
        openai_stream.count_tokens({"choices": []})
        == openai_stream.count_tokens({"choices": [3]})
        == (0, None)
    )
