"""Completions, responses, and the non-text parts of chat completions, with OpenAI's client."""

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


def test_a_text_is_gone_on_with_and_ids_say_the_same(tiny: Served) -> None:
    ids = list(tiny.bridge.runner.encode_prompt("Once upon a time"))
    with client(tiny) as asked:
        text = asked.completions.create(
            model="tiny", prompt="Once upon a time", max_tokens=12, logprobs=2
        )
        same = asked.completions.create(model="tiny", prompt=ids, max_tokens=12, echo=True)
        both = asked.completions.create(
            model="tiny", prompt=["Once upon a time", "Once"], max_tokens=1, echo=True
        )
        stream = list(
            asked.completions.create(
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
    assert [one.text.startswith("Once") for one in both.choices] == [
        True,
        True,
    ]  # without BOS, as a single one
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert [len(one) for one in choice.logprobs.top_logprobs or []] == [2] * 12
    for likeliest, drawn in zip(
        choice.logprobs.top_logprobs or [], choice.logprobs.token_logprobs or [], strict=True
    ):
        assert max(likeliest.values()) == drawn  # greedy
    assert "".join(one.choices[0].text for one in stream if one.choices) == choice.text
    offsets = [
        one.choices[0].logprobs.text_offset
        for one in stream
        if one.choices and one.choices[0].logprobs
    ]
    assert [at for (at,) in offsets] == choice.logprobs.text_offset
    assert stream[-1].usage == text.usage.model_copy(
        update={"prompt_tokens_details": stream[-1].usage.prompt_tokens_details}
    )


def test_several_prompts_and_the_best_of_several_answers(tiny: Served) -> None:
    with client(tiny) as asked:
        one = [
            asked.completions.create(model="tiny", prompt=text, max_tokens=6)
            for text in ("One", "Two")
        ]
        both = asked.completions.create(model="tiny", prompt=["One", "Two"], max_tokens=6, n=2)
        best = asked.completions.create(
            model="tiny", prompt="One", max_tokens=6, best_of=4, temperature=2, seed=1
        )
        beams = asked.completions.create(
            model="tiny", prompt="One", max_tokens=6, n=2, extra_body={"beams": 3}
        )
    texts = [found.choices[0].text for found in one for _ in range(2)]
    assert [found.text for found in both.choices] == texts
    assert [found.index for found in both.choices] == [0, 1, 2, 3]
    assert len(best.choices) == 1
    assert best.usage.completion_tokens == 24
    assert len({found.text for found in beams.choices}) == 2


@pytest.mark.parametrize("most", [9, 0], ids=["two answers of three", "no answer has a token"])
def test_a_search_that_finds_fewer_answers_than_were_asked_for_tells_those(
    serve: Callable[..., Served], most: int
) -> None:
    more: Any = {"beams": 3, "grammar": 'root ::= "yes" | "no"'}
    with client(serve(b"yes")) as asked:
        chat: Any = {
            "model": "tiny",
            "messages": HELLO,
            "n": 3,
            "max_tokens": most,
            "extra_body": more,
        }
        talk = asked.chat.completions.create(**chat)
        talked = list(asked.chat.completions.create(**chat, stream=True))
        text: Any = {
            "model": "tiny",
            "prompt": ["a", "b"],
            "n": 3,
            "max_tokens": most,
            "echo": True,
            "extra_body": more,
        }
        gone_on = asked.completions.create(**text)
        going = list(asked.completions.create(**text, stream=True))
    found = ["yes", "no"] if most else [""]
    assert [one.message.content for one in talk.choices] == found
    assert [told(talked, index) for index in range(3)] == [
        found[0],
        found[1] if most else None,
        None,
    ]
    places = range(len(found))
    assert [(one.index, one.text) for one in gone_on.choices] == [
        (3 * number + at, prompt + found[at]) for number, prompt in enumerate("ab") for at in places
    ]
    assert {one.index: told(going, one.index) for one in gone_on.choices} == {
        one.index: one.text for one in gone_on.choices
    }
    assert {one.choices[0].index for one in going} == {one.index for one in gone_on.choices}


def told(chunks: list[Any], index: int) -> str | None:
    """What a stream told of a choice, with a beginning and an end; None where it told nothing of
    it.
    """
    mine = [one.choices[0] for one in chunks if one.choices and one.choices[0].index == index]
    if not mine:
        return None
    assert [bool(one.finish_reason) for one in mine] == [False] * (len(mine) - 1) + [True]
    return "".join((one.delta.content if hasattr(one, "delta") else one.text) or "" for one in mine)


def test_an_answer_follows_a_schema_or_a_grammar(tiny: Served) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "it", "strict": True, "schema": SCHEMA},
    }
    with client(tiny) as asked:
        create = asked.chat.completions.create
        found = (
            create(model="tiny", messages=HELLO, response_format=form).choices[0].message.content
        )
        drawn = (
            create(model="tiny", messages=HELLO, extra_body={"grammar": 'root ::= "ab"'})
            .choices[0]
            .message.content
        )
        text = (
            asked.completions.create(model="tiny", prompt="x", extra_body={"json_schema": SCHEMA})
            .choices[0]
            .text
        )
        anything = create(
            model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=5
        )
    assert json.loads(found or "")["a"] in ("yes", "no")
    assert drawn == "ab"
    assert json.loads(text)["a"] in ("yes", "no")
    assert (anything.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_must_be_is_made_and_streamed_alike(tiny: Served, choice: Any) -> None:
    args = {
        "model": "tiny",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    with client(tiny) as asked:
        whole = asked.chat.completions.create(**args)
        parts = list(asked.chat.completions.create(**args, stream=True))
    (call,) = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    assert call.function.name == "weather"
    deltas = [one for part in parts for one in part.choices[0].delta.tool_calls or []]
    assert {one.index for one in deltas} == {0}
    assert deltas[0].function.name == "weather"
    assert json.loads("".join(one.function.arguments or "" for one in deltas)) == json.loads(
        call.function.arguments
    )
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_a_strict_call_is_bound_though_nobody_asks_for_one(serve: Callable[..., Served]) -> None:
    def speak(tokens: list[int]) -> int:
        answer = bytes(token for token in tokens if token < 256).rpartition(b"<assistant>")[2]
        wanted = b'I look. <tool_call>{"town": 5} never mind'
        return (
            257 if b"</tool_call>" in answer or len(answer) >= len(wanted) else wanted[len(answer)]
        )

    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    args: Any = {"model": "tiny", "messages": HELLO}
    served = serve(speak, n_ctx=2048)
    with client(served) as asked:
        bound = asked.chat.completions.create(**args, tools=[strict]).choices[0]
        free = asked.chat.completions.create(**args, tools=TOOLS).choices[0]
        answer = asked.responses.create(model="tiny", input="x", tools=FLAT).output
    assert bound.message.content == "I look."
    (call,) = bound.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["a"] in (
        "yes",
        "no",
    )
    assert free.message.content.endswith("never mind") and not free.message.tool_calls
    assert [one.type for one in answer] == ["message", "function_call"]
    body = {
        **args,
        "tools": [
            {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"x": 1}}}
        ],
    }
    with (
        client(served) as asked,
        pytest.raises(openai.BadRequestError, match="function f: the schema cannot"),
    ):
        asked.chat.completions.create(**body)


CALLS = (
    'I look. <tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"a": "no"}}\n</tool_call> So.'
)


@pytest.mark.parametrize("most", [300, CALLS.index('"yes"')])  # the second ends within a call
def test_calls_come_in_pieces_that_the_client_puts_together(
    serve: Callable[..., Served], most: int
) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    args: Any = {"model": "tiny", "messages": HELLO, "tools": strict, "max_tokens": most}
    with client(serve(CALLS.encode(), n_ctx=2048)) as asked:
        whole = asked.chat.completions.create(**args)
        parts = list(asked.chat.completions.create(**args, stream=True))
        answer = asked.responses.create(model="tiny", input="x", tools=FLAT, max_output_tokens=most)
        events = list(
            asked.responses.create(
                model="tiny", input="x", tools=FLAT, max_output_tokens=most, stream=True
            )
        )
        if most == 300:
            with asked.chat.completions.stream(**args) as stream:
                built = stream.get_final_completion().choices[0].message
            told = [one.function.arguments for one in built.tool_calls]
            assert told == [one.function.arguments for one in whole.choices[0].message.tool_calls]
            assert built.content == whole.choices[0].message.content
    calls = [one.function.arguments for one in whole.choices[0].message.tool_calls]
    assert calls == (['{"a": "yes"}', '{"a": "no"}'] if most == 300 else ['{"a": '])
    assert (
        whole.choices[0].finish_reason
        == parts[-1].choices[0].finish_reason
        == ("tool_calls" if most == 300 else "length")
    )
    deltas = [one for part in parts for one in part.choices[0].delta.tool_calls or []]
    joined = [
        "".join(one.function.arguments or "" for one in deltas if one.index == at)
        for at in range(len(calls))
    ]
    assert joined == calls
    assert (
        len(deltas) > 5
        and deltas[0].function.name == "weather"
        and not deltas[0].function.arguments
    )
    made = [one for one in answer.output if one.type == "function_call"]
    assert [one.arguments for one in made] == calls
    assert [one.status for one in made] == (["completed"] * 2 if most == 300 else ["incomplete"])
    for number, item in enumerate(answer.output):
        if item.type == "function_call":
            mine = [one for one in events if getattr(one, "output_index", None) == number]
            pieces = [
                one.delta for one in mine if one.type == "response.function_call_arguments.delta"
            ]
            assert len(pieces) > 3 and "".join(pieces) == item.arguments
            assert [
                one.arguments for one in mine if one.type == "response.function_call_arguments.done"
            ] == [item.arguments]


def test_calls_and_their_results_reach_the_model(serve: Callable[..., Served]) -> None:
    said: list[str] = []

    def speak(tokens: list[int]) -> int:
        said.append(bytes(token for token in tokens if token < 256).decode())
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
    with client(serve(speak, n_ctx=2048)) as asked:
        asked.chat.completions.create(model="tiny", messages=[*HELLO, *more], tools=TOOLS)
    for part in (
        "<tools>",
        '"description": "Of a day"',
        '"arguments": {"a": "yes"}',
        "<tool_response>\nsunny",
    ):
        assert part in said[-1]


def test_thinking_stands_apart_whole_and_streamed(serve: Callable[..., Served]) -> None:
    with client(serve(b"<think>\nhm, so\n</think>\n\nyes")) as asked:
        whole = asked.chat.completions.create(model="tiny", messages=HELLO)
        parts = list(asked.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert whole.choices[0].message.content == "yes"
    assert whole.choices[0].message.reasoning_content == "hm, so\n"
    assert whole.usage.completion_tokens_details.reasoning_tokens > 8
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(one.content or "" for one in deltas) == "yes"
    assert "".join(getattr(one, "reasoning_content", "") for one in deltas) == "hm, so\n"


def test_every_token_has_its_likeliest_alternatives(tiny: Served) -> None:
    args: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with client(tiny) as asked:
        whole = asked.chat.completions.create(**args)
        parts = list(asked.chat.completions.create(**args, stream=True))
    content = whole.choices[0].logprobs.content
    assert [len(one.top_logprobs) for one in content] == [3] * 5
    assert all(one.top_logprobs[0].logprob == one.logprob <= 0 for one in content)
    assert (
        b"".join(bytes(one.bytes or []) for one in content).decode()
        == whole.choices[0].message.content
    )
    streamed = [
        one
        for part in parts
        if part.choices[0].logprobs
        for one in part.choices[0].logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in content]


def test_a_message_can_be_gone_on_with(serve: Callable[..., Served]) -> None:
    with client(serve(b"I say hello")) as asked:
        said: Any = [*HELLO, {"role": "assistant", "content": "I say"}]
        body = {"continue_final_message": True, "add_generation_prompt": False}
        found = asked.chat.completions.create(model="tiny", messages=said, extra_body=body)
    assert found.choices[0].message.content == " hello"


def test_responses_are_items_and_events_that_the_client_knows(tiny: Served) -> None:
    known = TypeAdapter(ResponseStreamEvent)
    with client(tiny) as asked:
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
                "max_output_tokens": 60,
                **more,
            }
            whole = asked.responses.with_raw_response.create(**args)
            found = Response.model_validate(json.loads(whole.text))
            events = list(asked.responses.create(**args, stream=True))
            for event in events:
                known.validate_python(event.to_dict())
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last = events[-1].response
            assert [one.type for one in last.output] == [one.type for one in found.output]
            assert last.output_text == found.output_text
            assert (
                "".join(one.delta for one in events if one.type == "response.output_text.delta")
                == last.output_text
            )
            assert last.usage.output_tokens == found.usage.output_tokens
            if "tools" in more:
                assert found.output[0].name == "weather"
                assert found.status == "completed"


def test_a_responses_log_probabilities_are_those_of_its_text_whole_and_streamed(
    serve: Callable[..., Served],
) -> None:
    """Of each byte, also where a piece of text is held until it is certain."""
    said = "Gr\u00fc\u00dfe, \U0001f600 \n."
    args: Any = {
        "model": "tiny",
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "tools": FLAT,
    }
    with client(serve(said.encode(), n_ctx=2048)) as asked:
        whole = asked.responses.create(**args)
        events = list(asked.responses.create(**args, stream=True))
    for found in (whole, events[-1].response):
        (message,) = found.output
        assert message.content[0].text == said
        assert (
            bytes(byte for one in message.content[0].logprobs for byte in one.bytes)
            == said.encode()
        )
    deltas = [one for one in events if one.type == "response.output_text.delta"]
    assert (
        b"".join(bytes(one.to_dict()["bytes"]) for event in deltas for one in event.logprobs)
        == said.encode()
    )


def test_a_conversation_of_items_is_one_of_messages(serve: Callable[..., Served]) -> None:
    said: list[str] = []

    def speak(tokens: list[int]) -> int:
        said.append(bytes(token for token in tokens if token < 256).decode())
        return 257

    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    with client(serve(speak, n_ctx=2048)) as asked:
        asked.responses.create(model="tiny", input=items, instructions="Be brief.")
    assert said[-1].startswith("<system>Be brief.\n<user>Hi\n<assistant><tool_call>")
    assert said[-1].endswith("<user><tool_response>\nsunny\n</tool_response>\n<assistant>")


def test_what_is_sent_has_the_shape_that_the_client_declares(serve: Callable[..., Served]) -> None:
    with client(serve()) as asked:
        whole = asked.chat.completions.with_raw_response.create(model="tiny", messages=HELLO)
        ChatCompletion.model_validate(json.loads(whole.text))
        for part in asked.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            ChatCompletionChunk.model_validate(part.to_dict())
