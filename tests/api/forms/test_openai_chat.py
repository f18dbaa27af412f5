"""/v1/chat/completions and /v1/models with OpenAI's client."""

from collections.abc import Callable

import openai
import pytest

from tests.fixtures.server import Served

HELLO = [{"role": "user", "content": "Once upon a time"}]


def client(served: Served, **more: object) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": served.v1, "api_key": "none", "max_retries": 0, **more})


def test_a_conversation_is_answered_whole_and_streamed_alike(tiny: Served) -> None:
    with client(tiny) as asked:
        whole = asked.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20)
        stream = asked.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == choice.message.content
    assert {one.id for one in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_samples_are_choices(serve: Callable[..., Served]) -> None:
    with client(serve()) as asked:
        found = asked.chat.completions.create(model="tiny", messages=HELLO, n=3)
        streamed = {0: "", 1: "", 2: ""}
        for one in asked.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True):
            streamed[one.choices[0].index] += one.choices[0].delta.content or ""
    assert [one.message.content for one in found.choices] == ["hello"] * 3
    assert streamed == {0: "hello", 1: "hello", 2: "hello"}


def test_models_are_told_and_others_are_not_found(serve: Callable[..., Served]) -> None:
    with client(serve(names=("tiny", "gpt-4"))) as asked:
        assert [one.id for one in asked.models.list()] == ["tiny", "gpt-4"]
        assert asked.models.retrieve("gpt-4").owned_by == "llmcli"
        assert asked.chat.completions.create(model="gpt-4", messages=HELLO).model == "gpt-4"
        with pytest.raises(openai.NotFoundError, match="not served here"):
            asked.models.retrieve("other")
        with pytest.raises(openai.NotFoundError) as told:
            asked.chat.completions.create(model="other", messages=HELLO)
    assert told.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(
    serve: Callable[..., Served],
) -> None:
    with client(serve(n_ctx=64)) as asked, pytest.raises(openai.BadRequestError) as told:
        asked.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 100}]
        )
    assert told.value.code == "context_length_exceeded"
    assert told.value.body["n_prompt_tokens"] > 100
    assert told.value.body["n_ctx"] == 64


def test_a_key_is_needed_where_there_are_keys(serve: Callable[..., Served]) -> None:
    served = serve(keys=("secret-key-1", "secret-key-2"))
    with client(served) as asked, pytest.raises(openai.AuthenticationError):
        asked.models.list()
    with client(served, api_key="secret-key-2") as asked:
        assert (
            asked.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content
            == "hello"
        )
