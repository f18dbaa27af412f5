"""What `/v1/responses` is asked: `input` as text or as items, read into a conversation."""

from typing import Any

from llmcli.serve.problems import Problem
from llmcli.serve.schema.fields import Fields
from llmcli.serve.schema.messages import MOST, ROLES, arguments, content
from llmcli.types import Message


def conversation(fields: Fields) -> list[Message]:
    """Instructions and input; raises Problem naming the item that cannot be read."""
    said: list[Message] = []
    if instructions := fields.text("instructions"):
        said.append(Message("system", instructions))
    value = fields.values.get("input")
    if isinstance(value, str):
        return [*said, Message("user", value)]
    if value is None:
        raise Problem("input is missing", param="input")
    if not isinstance(value, list) or not value:
        raise fields.wrong("input", "text or a list of items")
    for item in fields.tables("input", MOST):
        _read(item, said)
    return said


def _read(item: Fields, said: list[Message]) -> None:
    match item.text("type", "message"):
        case "message":
            role = ROLES.get(item.needed("role"))
            if role is None or role == "tool":
                raise item.wrong("role", "one of system, developer, user, assistant")
            said.append(Message(role, content(item)))
        case "function_call":
            _called(item, said)
        case "function_call_output":
            output = item.values.get("output")
            text = output if isinstance(output, str) else content(item, "output")
            said.append(Message("tool", text, {"tool_call_id": item.needed("call_id")}))
        case "reasoning":  # what was thought before is not thought again
            pass
        case sort:
            raise Problem(
                f"{item.path}: this server knows no items of the type {str(sort)[:40]}",
                param=item.path,
            )


def _called(item: Fields, said: list[Message]) -> None:
    """A call is part of the assistant's message before it, where there is one."""
    about: dict[str, Any] = {
        "name": item.needed("name"),
        "arguments": arguments(item.text("arguments") or "{}"),
    }
    call = {"id": item.needed("call_id"), "type": "function", "function": about}
    if said and said[-1].role == "assistant":
        last = said.pop()
        calls = [*last.more.get("tool_calls", ()), call]
        said.append(Message("assistant", last.content, {**last.more, "tool_calls": calls}))
    else:
        said.append(Message("assistant", "", {"tool_calls": [call]}))
