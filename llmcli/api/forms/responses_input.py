"""Reads the input of `/v1/responses`, text or items, as a conversation."""

from typing import Any

from llmcli.api.errors import Problem
from llmcli.api.fields import Fields
from llmcli.api.forms.messages import MOST, ROLES, arguments, content
from llmcli.types import Message


def conversation(fields: Fields) -> list[Message]:
    """Return the messages of `instructions` and `input`. Raises ApiError with the path of an
    invalid item.
    """
    messages: list[Message] = []
    if instructions := fields.text("instructions"):
        messages.append(Message("system", instructions))
    value = fields.values.get("input")
    if isinstance(value, str):
        return [*messages, Message("user", value)]
    if value is None:
        raise Problem("input is missing", param="input")
    if not isinstance(value, list) or not value:
        raise fields.wrong("input", "text or a list of items")
    for item in fields.tables("input", MOST):
        _read_item(item, messages)
    return messages


def _read_item(item: Fields, said: list[Message]) -> None:
    match item.text("type", "message"):
        case "message":
            role = ROLES.get(item.needed("role"))
            if role is None or role == "tool":
                raise item.wrong("role", "one of system, developer, user, assistant")
            said.append(Message(role, content(item)))
        case "function_call":
            _add_call(item, said)
        case "function_call_output":
            output = item.values.get("output")
            text = output if isinstance(output, str) else content(item, "output")
            said.append(Message("tool", text, {"tool_call_id": item.needed("call_id")}))
        case "reasoning":  # earlier reasoning is not shown to the model
            pass
        case kind:
            raise Problem(
                f"{item.path}: items of type {str(kind)[:40]} are not supported", param=item.path
            )


def _add_call(item: Fields, said: list[Message]) -> None:
    """Add a call to the assistant's message before it, or start one."""
    function: dict[str, Any] = {
        "name": item.needed("name"),
        "arguments": arguments(item.text("arguments") or "{}"),
    }
    call = {"id": item.needed("call_id"), "type": "function", "function": function}
    if said and said[-1].role == "assistant":
        last = said.pop()
        calls = [*last.more.get("tool_calls", ()), call]
        said.append(Message("assistant", last.content, {**last.more, "tool_calls": calls}))
    else:
        said.append(Message("assistant", "", {"tool_calls": [call]}))
