"""Converts the input of `/v1/responses`, which is a text or a list of items, to a conversation."""

from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields
from llmcli.api.forms.messages import MAX_MESSAGES, ROLES, read_content
from llmcli.types import Message


def read_conversation(fields: Fields) -> list[Message]:
    """Return the conversation in the fields `instructions` (the system text) and `input`. Raises
    ApiError with the path of an invalid item.
    """
    messages: list[Message] = []
    if instructions := fields.text("instructions"):
        messages.append(Message("system", instructions))
    value = fields.values.get("input")
    if isinstance(value, str):
        return [*messages, Message("user", value)]
    if value is None:
        raise ApiError("input is missing", param="input")
    if not isinstance(value, list) or not value:
        raise fields.type_error("input", "text or a list of items")
    for item in fields.tables("input", MAX_MESSAGES):
        _read_item(item, messages)
    return messages


def _read_item(item: Fields, messages: list[Message]) -> None:
    """Append an item of the input to the conversation `messages`."""
    match item.text("type", "message"):
        case "message":
            role = ROLES.get(item.required_text("role"))
            if role is None or role == "tool":
                raise item.type_error("role", "one of system, developer, user, assistant")
            messages.append(Message(role, read_content(item)))
        case "function_call":
            _add_call(item, messages)
        case "function_call_output":
            output = item.values.get("output")
            text = output if isinstance(output, str) else read_content(item, "output")
            messages.append(Message("tool", text, {"tool_call_id": item.required_text("call_id")}))
        case "reasoning":  # the model does not receive earlier reasoning
            pass
        case kind:
            raise ApiError(
                f"{item.path}: items of type {str(kind)[:40]} are not supported", param=item.path
            )


def _add_call(item: Fields, messages: list[Message]) -> None:
    """Append a function call to the last message if that is the assistant's; otherwise append a new
    message with the call. Templates expect all calls of a turn in one message.
    """
    function: dict[str, Any] = {
        "name": item.required_text("name"),
        "arguments": item.text("arguments") or "{}",
    }
    call = {"id": item.required_text("call_id"), "type": "function", "function": function}
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        calls = [*last.template_fields.get("tool_calls", ()), call]
        messages.append(
            Message("assistant", last.content, {**last.template_fields, "tool_calls": calls})
        )
    else:
        messages.append(Message("assistant", "", {"tool_calls": [call]}))
