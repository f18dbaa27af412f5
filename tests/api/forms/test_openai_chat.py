"""/v1/chat/completions and /v1/models with OpenAI's client."""

from collections.abc import Callable

import openai
import pytest

from tests.fixtures.server import Served

HELLO = [{"role": "user", "content": "Once upon a time"}]


def client(served: Served, **more: object) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": served.v1, "api_key": "none", "max_retries": 0, **more})


def test_a_stream_has_the_text_of_the_complete_response(tiny: Served) -> None:
    with client(tiny) as api:
        complete = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20)
        stream = api.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    choice = complete.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert complete.usage.completion_tokens == 20
    assert complete.usage.total_tokens == complete.usage.prompt_tokens + 20
    text = "".join(entry.choices[0].delta.content or "" for entry in chunks if entry.choices)
    assert text == choice.message.content
    assert {entry.id for entry in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_samples_are_choices(serve: Callable[..., Served]) -> None:
    with client(serve()) as api:
        found = api.chat.completions.create(model="tiny", messages=HELLO, n=3)
        streamed = {0: "", 1: "", 2: ""}
        for entry in api.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True):
            streamed[entry.choices[0].index] += entry.choices[0].delta.content or ""
    assert [entry.message.content for entry in found.choices] == ["hello"] * 3
    assert streamed == {0: "hello", 1: "hello", 2: "hello"}


def test_served_models_are_listed_and_every_name_is_answered(serve: Callable[..., Served]) -> None:
    with client(serve(names=("tiny", "gpt-4"))) as api:
        assert [entry.id for entry in api.models.list()] == ["tiny", "gpt-4"]
        assert api.models.retrieve("gpt-4").owned_by == "llmcli"
        assert api.chat.completions.create(model="gpt-4", messages=HELLO).model == "gpt-4"
        with pytest.raises(openai.NotFoundError, match="not served here"):
            api.models.retrieve("other")
        assert api.chat.completions.create(model="gpt-5", messages=HELLO).model == "tiny"


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(
    serve: Callable[..., Served],
) -> None:
    with client(serve(n_ctx=64)) as api, pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 100}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body["n_prompt_tokens"] > 100
    assert caught.value.body["n_ctx"] == 64


def test_a_key_is_required_if_the_server_has_keys(serve: Callable[..., Served]) -> None:
    served = serve(keys=("secret-key-1", "secret-key-2"))
    with client(served) as api, pytest.raises(openai.AuthenticationError):
        api.models.list()
    with client(served, api_key="secret-key-2") as api:
        assert (
            api.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content
            == "hello"
        )


def test_a_stream_begins_with_the_role_and_every_answer_names_the_build(tiny: Served) -> None:
    body = {"model": "tiny", "max_tokens": 2}
    with client(tiny) as api:
        chat = api.chat.completions.create(**body, messages=HELLO)
        chunks = list(api.chat.completions.create(**body, messages=HELLO, stream=True))
        completion = api.completions.create(**body, prompt="Once")
        texts = list(api.completions.create(**body, prompt="Once", stream=True))
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == (
        "assistant",
        None,
    )
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    (fingerprint,) = {answer.system_fingerprint for answer in (chat, completion, *chunks, *texts)}
    assert fingerprint.startswith("b")
