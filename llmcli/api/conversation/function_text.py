"""Writes functions, their calls and results as plain text, for chat templates that cannot."""

import json
from collections.abc import Sequence
from typing import Any

from llmcli.api.conversation.tools import ToolSet
from llmcli.api.tool_calls.base import ToolCallFormat, escape_json
from llmcli.runtime.text.conversation_layout import argument_values
from llmcli.runtime.text.tracked_text import from_outside, join_texts
from llmcli.types import Message

# The prompt for models whose template does not support tools. It is the text of the Hermes models,
# which most models have seen in training.
TOOLS_PROMPT = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n{}\n</tools>\n\n"
    "For each function call, return a JSON object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <arguments-object>}}\n</tool_call>'
)
RESULT_FRAME = "<tool_response>\n", "\n</tool_response>"
PLACEHOLDER = "function_name"  # in place of a name in the frame of a call


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether a conversation has tool calls or results of them."""
    return any(
        message.role == "tool" or message.template_fields.get("tool_calls") for message in messages
    )


def spell_out_functions(messages: Sequence[Message], tools: ToolSet) -> list[Message]:
    """Return the conversation with the functions as a system text."""
    if not tools.tools:
        return list(messages)
    definitions = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools.tools)
    opening, closing = TOOLS_PROMPT.format(PLACEHOLDER).split(PLACEHOLDER)
    prompt = join_texts([opening, from_outside(definitions), closing])
    return [*messages, Message("system", prompt)]


def spell_out_calls(
    messages: Sequence[Message], call_format: ToolCallFormat, with_results: bool
) -> list[Message]:
    """Return the conversation with tool calls as text in a format of calls. `with_results`: their
    results are texts of the user.
    """
    return [_spell_out(message, call_format, with_results) for message in messages]


def _spell_out(message: Message, call_format: ToolCallFormat, with_results: bool) -> Message:
    if message.role == "tool" and with_results:
        opening, closing = RESULT_FRAME
        return Message("user", join_texts([opening, from_outside(message.content), closing]))
    calls = message.template_fields.get("tool_calls")
    if not calls:
        return message
    opening, separator, closing = call_format.wrappers
    written = [_write_call(call["function"], call_format) for call in calls]
    text = join_texts([opening, join_texts(written, separator or ""), closing])
    further = {
        name: value for name, value in message.template_fields.items() if name != "tool_calls"
    }
    texts = [from_outside(message.content)] if message.content else []
    return Message(message.role, join_texts([*texts, text], "\n"), further)


def _write_call(function: dict[str, Any], call_format: ToolCallFormat) -> str:
    """Return a call as text. The words around the name and the arguments are llmcli's own."""
    _, arguments = argument_values(function["arguments"])
    before, after = call_format.forced_frame(PLACEHOLDER)
    before_name, _, after_name = before.partition(PLACEHOLDER)
    name = escape_json(function["name"])
    return join_texts([before_name, from_outside(name), after_name, from_outside(arguments), after])
