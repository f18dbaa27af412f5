"""Converts the input of `/v1/responses`, a text or a list of items, to a conversation."""

from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields
from llmcli.api.forms.messages import MAX_MESSAGES, ROLES, parse_template_arguments, read_content
from llmcli.types import Message


def read_conversation(fields: Fields) -> list[Message]:
    """Return the messages in the fields `instructions` and `input`. Raises ApiError with the path
    of an invalid item.
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


def _read_item(item: Fields, said: list[Message]) -> None:
    match item.text("type", "message"):
        case "message":
            role = ROLES.get(item.required_text("role"))
            if role is None or role == "tool":
                raise item.type_error("role", "one of system, developer, user, assistant")
            said.append(Message(role, read_content(item)))
        case "function_call":
            _add_call(item, said)
        case "function_call_output":
            output = item.values.get("output")
            text = output if isinstance(output, str) else read_content(item, "output")
            said.append(Message("tool", text, {"tool_call_id": item.required_text("call_id")}))
        case "reasoning":  # the model does not receive earlier reasoning
            pass
        case kind:
            raise ApiError(
                f"{item.path}: items of type {str(kind)[:40]} are not supported", param=item.path
            )


def _add_call(item: Fields, said: list[Message]) -> None:
    """Add a call to the assistant's message at the end of the conversation, or to a new message if
    the last one is not the assistant's.
    """
    function: dict[str, Any] = {
        "name": item.required_text("name"),
        "arguments": parse_template_arguments(item.text("arguments") or "{}"),
    }
    call = {"id": item.required_text("call_id"), "type": "function", "function": function}
    if said and said[-1].role == "assistant":
        last = said.pop()
        calls = [*last.template_fields.get("tool_calls", ()), call]
        said.append(
            Message("assistant", last.content, {**last.template_fields, "tool_calls": calls})
        )
    else:
        said.append(Message("assistant", "", {"tool_calls": [call]}))
