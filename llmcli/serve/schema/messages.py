"""Reads OpenAI's messages as a conversation: roles, texts, calls and their results."""

import json
from typing import Any

from llmcli.runtime.thinking import split
from llmcli.serve.problems import Problem
from llmcli.serve.schema.fields import Fields, kind
from llmcli.types import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MOST = 10_000


def messages(fields: Fields, name: str = "messages") -> list[Message]:
    """The conversation; raises Problem naming the message that is none."""
    if not fields.has(name):
        raise Problem(f"{name} is missing", param=name)
    found = [_message(one) for one in fields.tables(name, MOST)]
    if not found:
        raise Problem(f"{name} is empty: it takes at least one message", param=name)
    return found


def _message(fields: Fields) -> Message:
    role = ROLES.get(fields.needed("role"))
    if role is None:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    more: dict[str, Any] = {name: found for name in ("name",) if (found := fields.text(name))}
    if role != "assistant" and not fields.has("content"):
        raise Problem(f"{fields.at('content')} is missing", param=fields.at("content"))
    text = content(fields)
    if role == "assistant":
        if calls := [_call(one) for one in fields.tables("tool_calls")]:
            more["tool_calls"] = calls
        thought, said = split(text)
        text = said if thought else text  # as templates want it: most take it out themselves
        if reasoning := fields.text("reasoning_content"):
            more["reasoning_content"] = reasoning
    if role == "tool":
        more["tool_call_id"] = fields.needed("tool_call_id")
    return Message(role, text, more)


def _call(fields: Fields) -> dict[str, Any]:
    inner = fields.table("function")
    if inner is None:
        raise Problem(f"{fields.at('function')} is missing", param=fields.at("function"))
    about = {"name": inner.needed("name"), "arguments": arguments(inner.text("arguments") or "{}")}
    return {"id": fields.text("id") or "", "type": "function", "function": about}


def arguments(text: str) -> Any:
    """A call's arguments as templates want them: an object where the text is one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def content(fields: Fields, name: str = "content") -> str:
    """A message's text: as it is, or the text parts of a list one after another."""
    value = fields.values.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise Problem(
            f"{fields.at(name)} must be text or a list of parts, not {kind(value)}",
            param=fields.at(name),
        )
    return "".join(_part(one) for one in fields.tables(name))


def _part(fields: Fields) -> str:
    sort = fields.needed("type")
    if sort not in PARTS:
        raise Problem(f"{fields.path}: this server reads text, not {sort[:40]}", param=fields.path)
    return fields.needed(PARTS[sort])
