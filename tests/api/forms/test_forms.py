"""Completions, Responses, and chat completions with tools, thinking, schemas and log-probabilities,
with OpenAI's client.
"""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": SCHEMA, "description": "Of a day"},
    }
]
FLAT: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]


def test_a_text_and_its_token_ids_give_the_same_completion(tiny: Served) -> None:
    ids = list(tiny.bridge.runner.encode_prompt("Once upon a time"))
    with client(tiny) as api:
        text = api.completions.create(
            model="tiny", prompt="Once upon a time", max_tokens=12, logprobs=2
        )
        same = api.completions.create(model="tiny", prompt=ids, max_tokens=12, echo=True)
        two_prompts = api.completions.create(
            model="tiny", prompt=["Once upon a time", "Once"], max_tokens=1, echo=True
        )
        stream = list(
            api.completions.create(
                model="tiny",
                prompt="Once upon a time",
                max_tokens=12,
                logprobs=2,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    choice = text.choices[0]
    assert same.choices[0].text.endswith("Once upon a time" + choice.text)
    assert [entry.text.startswith("Once") for entry in two_prompts.choices] == [
        True,
        True,
    ]  # without BOS, as a single one
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert [len(entry) for entry in choice.logprobs.top_logprobs or []] == [2] * 12
    for likeliest, sampled in zip(
        choice.logprobs.top_logprobs or [], choice.logprobs.token_logprobs or [], strict=True
    ):
        assert max(likeliest.values()) == sampled  # greedy
    assert "".join(entry.choices[0].text for entry in stream if entry.choices) == choice.text
    offsets = [
        entry.choices[0].logprobs.text_offset
        for entry in stream
        if entry.choices and entry.choices[0].logprobs
    ]
    assert [at for (at,) in offsets] == choice.logprobs.text_offset
    assert stream[-1].usage == text.usage.model_copy(
        update={"prompt_tokens_details": stream[-1].usage.prompt_tokens_details}
    )


def test_several_prompts_and_the_best_of_several_answers(tiny: Served) -> None:
    with client(tiny) as api:
        entry = [
            api.completions.create(model="tiny", prompt=text, max_tokens=6)
            for text in ("One", "Two")
        ]
        two_prompts = api.completions.create(model="tiny", prompt=["One", "Two"], max_tokens=6, n=2)
        best = api.completions.create(
            model="tiny", prompt="One", max_tokens=6, best_of=4, temperature=2, seed=1
        )
        beams = api.completions.create(
            model="tiny", prompt="One", max_tokens=6, n=2, extra_body={"beams": 3}
        )
    texts = [found.choices[0].text for found in entry for _ in range(2)]
    assert [found.text for found in two_prompts.choices] == texts
    assert [found.index for found in two_prompts.choices] == [0, 1, 2, 3]
    assert len(best.choices) == 1
    assert best.usage.completion_tokens == 24
    assert len({found.text for found in beams.choices}) == 2


@pytest.mark.parametrize(
    "max_tokens", [9, 0], ids=["two answers of three", "no answer has a token"]
)
def test_a_beam_search_may_return_fewer_choices_than_n(
    serve: Callable[..., Served], max_tokens: int
) -> None:
    more: Any = {"beams": 3, "grammar": 'root ::= "yes" | "no"'}
    with client(serve(b"yes")) as api:
        chat: Any = {
            "model": "tiny",
            "messages": HELLO,
            "n": 3,
            "max_tokens": max_tokens,
            "extra_body": more,
        }
        complete_chat = api.chat.completions.create(**chat)
        streamed_chat = list(api.chat.completions.create(**chat, stream=True))
        text: Any = {
            "model": "tiny",
            "prompt": ["a", "b"],
            "n": 3,
            "max_tokens": max_tokens,
            "echo": True,
            "extra_body": more,
        }
        complete_text = api.completions.create(**text)
        streamed_text = list(api.completions.create(**text, stream=True))
    found = ["yes", "no"] if max_tokens else [""]
    assert [entry.message.content for entry in complete_chat.choices] == found
    assert [choice_text(streamed_chat, index) for index in range(3)] == [
        found[0],
        found[1] if max_tokens else None,
        None,
    ]
    indices = range(len(found))
    assert [(entry.index, entry.text) for entry in complete_text.choices] == [
        (3 * number + at, prompt + found[at])
        for number, prompt in enumerate("ab")
        for at in indices
    ]
    assert {
        entry.index: choice_text(streamed_text, entry.index) for entry in complete_text.choices
    } == {entry.index: entry.text for entry in complete_text.choices}
    assert {entry.choices[0].index for entry in streamed_text} == {
        entry.index for entry in complete_text.choices
    }


def choice_text(chunks: list[Any], index: int) -> str | None:
    """Return a choice's text from the chunks of a stream, or None if no chunk belongs to it. Only
    its last chunk may have a finish reason.
    """
    matching = [
        entry.choices[0] for entry in chunks if entry.choices and entry.choices[0].index == index
    ]
    if not matching:
        return None
    assert [bool(entry.finish_reason) for entry in matching] == [False] * (len(matching) - 1) + [
        True
    ]
    return "".join(
        (entry.delta.content if hasattr(entry, "delta") else entry.text) or "" for entry in matching
    )


def test_an_answer_follows_a_schema_or_a_grammar(tiny: Served) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "it", "strict": True, "schema": SCHEMA},
    }
    with client(tiny) as api:
        create = api.chat.completions.create
        found = (
            create(model="tiny", messages=HELLO, response_format=form).choices[0].message.content
        )
        sampled = (
            create(model="tiny", messages=HELLO, extra_body={"grammar": 'root ::= "ab"'})
            .choices[0]
            .message.content
        )
        text = (
            api.completions.create(model="tiny", prompt="x", extra_body={"json_schema": SCHEMA})
            .choices[0]
            .text
        )
        anything = create(
            model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=5
        )
    assert json.loads(found or "")["a"] in ("yes", "no")
    assert sampled == "ab"
    assert json.loads(text)["a"] in ("yes", "no")
    assert (anything.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    "choice", ["required", "any", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call_is_the_same_in_a_stream(serve: Callable[..., Served], choice: Any) -> None:
    args = {
        "model": "tiny",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    with client(serve(b"Well.", n_ctx=2048)) as api:
        complete = api.chat.completions.create(**args)
        parts = list(api.chat.completions.create(**args, stream=True))
    (call,) = complete.choices[0].message.tool_calls or []
    assert complete.choices[0].finish_reason == "tool_calls"
    assert complete.choices[0].message.content is None
    assert call.function.name == "weather"
    deltas = [entry for part in parts for entry in part.choices[0].delta.tool_calls or []]
    assert {entry.index for entry in deltas} == {0}
    assert deltas[0].function.name == "weather"
    assert json.loads("".join(entry.function.arguments or "" for entry in deltas)) == json.loads(
        call.function.arguments
    )
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_an_optional_strict_call_follows_its_schema(serve: Callable[..., Served]) -> None:
    def next_token(tokens: list[int]) -> int:
        answer = bytes(token for token in tokens if token < 256).rpartition(b"<assistant>")[2]
        output = b'I look. <tool_call>{"town": 5} never mind'
        return (
            257 if b"</tool_call>" in answer or len(answer) >= len(output) else output[len(answer)]
        )

    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    args: Any = {"model": "tiny", "messages": HELLO}
    served = serve(next_token, n_ctx=2048)
    with client(served) as api:
        strict_choice = api.chat.completions.create(**args, tools=[strict]).choices[0]
        loose_choice = api.chat.completions.create(**args, tools=TOOLS).choices[0]
        answer = api.responses.create(model="tiny", input="x", tools=FLAT).output
    assert strict_choice.message.content == "I look."
    (call,) = strict_choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["a"] in (
        "yes",
        "no",
    )
    assert (
        loose_choice.message.content.endswith("never mind") and not loose_choice.message.tool_calls
    )
    assert [entry.type for entry in answer] == ["message", "function_call"]
    body = {
        **args,
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}},
            }
        ],
    }
    with (
        client(served) as api,
        pytest.raises(openai.BadRequestError, match="function f: the schema cannot"),
    ):
        api.chat.completions.create(**body)


CALLS = (
    'I look. <tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"a": "no"}}\n</tool_call> So.'
)


@pytest.mark.parametrize("max_tokens", [300, CALLS.index('"yes"')])  # the second ends within a call
def test_the_client_joins_streamed_calls(serve: Callable[..., Served], max_tokens: int) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    args: Any = {"model": "tiny", "messages": HELLO, "tools": strict, "max_tokens": max_tokens}
    with client(serve(CALLS.encode(), n_ctx=2048)) as api:
        complete = api.chat.completions.create(**args)
        parts = list(api.chat.completions.create(**args, stream=True))
        answer = api.responses.create(
            model="tiny", input="x", tools=FLAT, max_output_tokens=max_tokens
        )
        events = list(
            api.responses.create(
                model="tiny", input="x", tools=FLAT, max_output_tokens=max_tokens, stream=True
            )
        )
        if max_tokens == 300:
            with api.chat.completions.stream(**args) as stream:
                assembled = stream.get_final_completion().choices[0].message
            choice_text = [entry.function.arguments for entry in assembled.tool_calls]
            assert choice_text == [
                entry.function.arguments for entry in complete.choices[0].message.tool_calls
            ]
            assert assembled.content == complete.choices[0].message.content
    calls = [entry.function.arguments for entry in complete.choices[0].message.tool_calls]
    assert calls == (['{"a": "yes"}', '{"a": "no"}'] if max_tokens == 300 else ['{"a": '])
    assert (
        complete.choices[0].finish_reason
        == parts[-1].choices[0].finish_reason
        == ("tool_calls" if max_tokens == 300 else "length")
    )
    deltas = [entry for part in parts for entry in part.choices[0].delta.tool_calls or []]
    joined = [
        "".join(entry.function.arguments or "" for entry in deltas if entry.index == at)
        for at in range(len(calls))
    ]
    assert joined == calls
    assert (
        len(deltas) > 5
        and deltas[0].function.name == "weather"
        and not deltas[0].function.arguments
    )
    function_calls = [entry for entry in answer.output if entry.type == "function_call"]
    assert [entry.arguments for entry in function_calls] == calls
    assert [entry.status for entry in function_calls] == (
        ["completed"] * 2 if max_tokens == 300 else ["incomplete"]
    )
    for number, item in enumerate(answer.output):
        if item.type == "function_call":
            matching = [entry for entry in events if getattr(entry, "output_index", None) == number]
            pieces = [
                entry.delta
                for entry in matching
                if entry.type == "response.function_call_arguments.delta"
            ]
            assert len(pieces) > 3 and "".join(pieces) == item.arguments
            assert [
                entry.arguments
                for entry in matching
                if entry.type == "response.function_call_arguments.done"
            ] == [item.arguments]


def test_calls_and_their_results_reach_the_model(serve: Callable[..., Served]) -> None:
    answer_text: list[str] = []

    def next_token(tokens: list[int]) -> int:
        answer_text.append(bytes(token for token in tokens if token < 256).decode())
        return 257

    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"a": "yes"}'},
    }
    more: Any = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    with client(serve(next_token, n_ctx=2048)) as api:
        api.chat.completions.create(model="tiny", messages=[*HELLO, *more], tools=TOOLS)
    for part in (
        "<tools>",
        '"description": "Of a day"',
        '"arguments": {"a": "yes"}',
        "<tool_response>\nsunny",
    ):
        assert part in answer_text[-1]


def test_thinking_is_separate_from_content(serve: Callable[..., Served]) -> None:
    with client(serve(b"<think>\nhm, so\n</think>\n\nyes")) as api:
        complete = api.chat.completions.create(model="tiny", messages=HELLO)
        parts = list(api.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert complete.choices[0].message.content == "yes"
    assert complete.choices[0].message.reasoning_content == "hm, so\n"
    # the fake model has a token for each byte, and the tags are not thinking
    assert complete.usage.completion_tokens_details.reasoning_tokens == len("\nhm, so\n")
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(entry.content or "" for entry in deltas) == "yes"
    assert "".join(getattr(entry, "reasoning_content", "") for entry in deltas) == "hm, so\n"


def test_every_token_has_its_likeliest_alternatives(tiny: Served) -> None:
    args: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with client(tiny) as api:
        complete = api.chat.completions.create(**args)
        parts = list(api.chat.completions.create(**args, stream=True))
    content = complete.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 5
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in content)
    assert (
        b"".join(bytes(entry.bytes or []) for entry in content).decode()
        == complete.choices[0].message.content
    )
    streamed = [
        entry
        for part in parts
        if part.choices[0].logprobs
        for entry in part.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_the_last_message_can_be_continued(serve: Callable[..., Served]) -> None:
    with client(serve(b"I say hello")) as api:
        answer_text: Any = [*HELLO, {"role": "assistant", "content": "I say"}]
        body = {"continue_final_message": True, "add_generation_prompt": False}
        found = api.chat.completions.create(model="tiny", messages=answer_text, extra_body=body)
    assert found.choices[0].message.content == " hello"


def test_response_items_and_events_are_known_to_the_client(serve: Callable[..., Served]) -> None:
    event_adapter = TypeAdapter(ResponseStreamEvent)
    with client(serve(b"Well.", n_ctx=2048)) as api:
        for more in (
            {},
            {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False},
            {"text": {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        ):
            args: Any = {
                "model": "tiny",
                "input": "Once upon",
                "instructions": "Tell.",
                "max_output_tokens": 400 if "tools" in more else 60,
                **more,
            }
            complete = api.responses.with_raw_response.create(**args)
            found = Response.model_validate(json.loads(complete.text))
            events = list(api.responses.create(**args, stream=True))
            for event in events:
                event_adapter.validate_python(event.to_dict())
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last = events[-1].response
            assert [entry.type for entry in last.output] == [entry.type for entry in found.output]
            assert last.output_text == found.output_text
            assert (
                "".join(
                    entry.delta for entry in events if entry.type == "response.output_text.delta"
                )
                == last.output_text
            )
            assert last.usage.output_tokens == found.usage.output_tokens
            if "tools" in more:
                assert found.output[0].name == "weather"
                assert found.status == "completed"


def test_response_logprobs_cover_every_byte_of_the_text(
    serve: Callable[..., Served],
) -> None:
    """Also while the splitter stores a text that may be the beginning of a call."""
    answer_text = "Gr\u00fc\u00dfe, \U0001f600 \n."
    args: Any = {
        "model": "tiny",
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "tools": FLAT,
    }
    with client(serve(answer_text.encode(), n_ctx=2048)) as api:
        complete = api.responses.create(**args)
        events = list(api.responses.create(**args, stream=True))
    for found in (complete, events[-1].response):
        (message,) = found.output
        assert message.content[0].text == answer_text
        assert (
            bytes(byte for entry in message.content[0].logprobs for byte in entry.bytes)
            == answer_text.encode()
        )
    deltas = [entry for entry in events if entry.type == "response.output_text.delta"]
    assert (
        b"".join(bytes(entry.to_dict()["bytes"]) for event in deltas for entry in event.logprobs)
        == answer_text.encode()
    )


def test_input_items_become_messages(serve: Callable[..., Served]) -> None:
    answer_text: list[str] = []

    def next_token(tokens: list[int]) -> int:
        answer_text.append(bytes(token for token in tokens if token < 256).decode())
        return 257

    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    with client(serve(next_token, n_ctx=2048)) as api:
        api.responses.create(model="tiny", input=items, instructions="Be brief.")
    assert answer_text[-1].startswith("<system>Be brief.\n<user>Hi\n<assistant><tool_call>")
    assert answer_text[-1].endswith("<user><tool_response>\nsunny\n</tool_response>\n<assistant>")


def test_responses_are_valid_for_the_clients_types(serve: Callable[..., Served]) -> None:
    with client(serve()) as api:
        complete = api.chat.completions.with_raw_response.create(model="tiny", messages=HELLO)
        ChatCompletion.model_validate(json.loads(complete.text))
        for part in api.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            ChatCompletionChunk.model_validate(part.to_dict())
