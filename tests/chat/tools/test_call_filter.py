"""The calls, the content and the shown text of an answer that arrives in pieces."""

import json

import pytest

from llmcli.api.conversation.tool_fields import define_function
from llmcli.api.conversation.tools import ToolSet
from llmcli.api.tool_calls import find_format, llama
from llmcli.api.tool_calls.base import ToolCallFormat
from llmcli.chat.tools.call_filter import CallFilter
from llmcli.runtime.text.reasoning import ThinkingTags

TOOLS = ToolSet((define_function("echo", "", {"properties": {"text": {"type": "string"}}}),))
HERMES, LLAMA = find_format(""), llama.FAMILIES[0]
ARGUMENTS = {"text": "  two  words\n and a line "}
HERMES_CALL = f'<tool_call>\n{{"name": "echo", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "echo", "parameters": {json.dumps(ARGUMENTS)}}}'
THINKING = "<think> so be it </think>"


@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("call_format", "answer", "shown", "content"),
    [
        (HERMES, HERMES_CALL, "", ""),
        (HERMES, f"Let me see.\n{HERMES_CALL}", "Let me see.", "Let me see."),
        (HERMES, f"{THINKING}\n\n{HERMES_CALL}", THINKING, ""),
        (HERMES, f"{THINKING}\n\nSo. {HERMES_CALL}", f"{THINKING}\n\nSo.", "\n\nSo."),
        (LLAMA, LLAMA_CALL, "", ""),
        (LLAMA, f"{THINKING}\n\n{LLAMA_CALL}", THINKING, ""),
    ],
)
def test_calls_are_the_same_however_the_answer_is_split(
    call_format: ToolCallFormat, answer: str, shown: str, content: str, length: int
) -> None:
    call_filter = CallFilter(None, call_format, TOOLS)
    pieces = [answer[start : start + length] for start in range(0, len(answer), length)]
    text = "".join(call_filter.feed(piece) for piece in pieces) + call_filter.finish()
    assert (text, call_filter.content) == (shown, content)
    assert [json.loads(call.arguments) for call in call_filter.calls] == [ARGUMENTS]


def test_thinking_that_the_prompt_has_opened_is_no_content() -> None:
    call_filter = CallFilter(ThinkingTags("<think>", "</think>"), HERMES, TOOLS)
    text = call_filter.feed(f"hm</think>{HERMES_CALL}") + call_filter.finish()
    assert (text, call_filter.content, len(call_filter.calls)) == ("hm</think>", "", 1)
