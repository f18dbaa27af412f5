"""Calls in blocks of code, which Qwen 2.5 Coder writes in place of <tool_call>."""

import json

import pytest

from llmcli.api.conversation.output_splitter import OutputSplitter
from llmcli.api.conversation.prompt import RenderedPrompt
from llmcli.api.conversation.tools import ToolDefinition, ToolSet
from llmcli.api.tool_calls import find_format
from tests.api.tool_calls.test_base import collect_output

HERMES = find_format("")
NAMES = frozenset({"weather"})
ARGUMENTS = {"city": "Rome", "days": [1, {"a": "``` }"}]}
CALL = {"name": "weather", "arguments": ARGUMENTS}
WRITTEN = [
    f"```json\n{json.dumps(CALL, indent=2)}\n```",
    f"```json\n{json.dumps(CALL)}\n```",
    f"```\n{json.dumps(CALL, indent=4)}\n```\n",
    f"```json\n{json.dumps({'name': 'weather', 'parameters': ARGUMENTS})}\n```",
]
OTHER = [
    '```json\n{\n  "name": "my-app",\n  "version": "1.0",\n  "arguments": {}\n}\n```\nThat is all.',
    '```json\n{"city": "Rome"}\n```',
    '```json\n{"name": "weather"}\n```',
    '```json\n{"name": 3, "arguments": {}}\n```',
    '```json\n{"name": "weather", "arguments": "none"}\n```',
    '```python\n{"name": "weather", "arguments": {}}\n```',
    '```json\n[{"name": "weather", "arguments": {}}]\n```',
    f'```json\n{{"name": "{"a" * 200}\n',
    "```json\n{",
    "```\nplain\n```",
]


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize("before", ["", "I look it up.\n\n"])
def test_a_block_of_code_with_a_call_is_a_call(text: str, before: str) -> None:
    for seed in range(8):
        found = collect_output(OutputSplitter(None, HERMES, NAMES), before + text, seed)
        assert found == {
            "thinking": "",
            "content": before.strip(),
            "calls": [("weather", ARGUMENTS)],
        }


def test_text_and_calls_follow_a_call() -> None:
    text = f"{WRITTEN[0]}\nThen\n{WRITTEN[1]}\nDone."
    for seed in range(8):
        found = collect_output(OutputSplitter(None, HERMES, NAMES), text, seed)
        assert found["calls"] == [("weather", ARGUMENTS)] * 2
        assert found["content"].split() == ["Then", "Done."]


@pytest.mark.parametrize("text", OTHER)
def test_other_blocks_of_code_are_text(text: str) -> None:
    for seed in range(8):
        found = collect_output(OutputSplitter(None, HERMES, NAMES), text, seed)
        assert found == {"thinking": "", "content": text, "calls": []}


def test_a_block_of_code_is_sent_as_soon_as_it_is_no_call() -> None:
    splitter = OutputSplitter(None, HERMES, NAMES)
    text = '```json\n{"name": "my-app", "version":'
    assert "".join(piece.text for piece in splitter.feed(text)) == text


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_strict_function_is_not_called_by_a_block_of_code(is_strict: bool) -> None:
    tools = ToolSet((ToolDefinition("weather", {"type": "object"}, {}, is_strict),))
    prompt = RenderedPrompt((1,), None, None, HERMES, tools)
    found = collect_output(prompt.new_splitter(), WRITTEN[0], 0)
    assert bool(found["calls"]) is not is_strict
    assert is_strict is (found["content"] == WRITTEN[0])


def test_a_grammar_for_optional_calls_has_tags_only() -> None:
    assert list(HERMES.optional_frames("weather")) == ["<tool_call>"]
    assert HERMES.visible_marks == ("<tool_call>", "</tool_call>")
