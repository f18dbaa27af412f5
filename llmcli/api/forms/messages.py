"""Converts OpenAI's messages, including tool calls and their results, to a conversation."""

from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields, json_type
from llmcli.runtime.text.reasoning import split_thinking
from llmcli.types import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
PART_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MAX_MESSAGES = 10_000


def read_messages(fields: Fields, name: str = "messages") -> list[Message]:
    """Return the messages in the field `name` as a conversation. Raises ApiError with the path of
    an invalid message.
    """
    if not fields.has(name):
        raise ApiError(f"{name} is missing", param=name)
    conversation = [_read_message(message) for message in fields.tables(name, MAX_MESSAGES)]
    if not conversation:
        raise ApiError(f"{name} is empty: at least one message is required", param=name)
    return conversation


def _read_message(fields: Fields) -> Message:
    role = ROLES.get(fields.required_text("role"))
    if role is None:
        raise fields.type_error("role", f"one of {', '.join(ROLES)}")
    template_fields: dict[str, Any] = {
        name: value for name in ("name",) if (value := fields.text(name))
    }
    if role != "assistant" and not fields.has("content"):
        raise ApiError(f"{fields.path_of('content')} is missing", param=fields.path_of("content"))
    text = read_content(fields)
    if role == "assistant":
        if calls := [_read_call(call) for call in fields.tables("tool_calls")]:
            template_fields["tool_calls"] = calls
        thinking, answer = split_thinking(text)
        # templates expect earlier answers without thinking, and most templates would remove it
        # anyway
        text = answer if thinking else text
        if reasoning := fields.text("reasoning_content"):
            template_fields["reasoning_content"] = reasoning
    if role == "tool":
        template_fields["tool_call_id"] = fields.required_text("tool_call_id")
    return Message(role, text, template_fields)


def _read_call(fields: Fields) -> dict[str, Any]:
    function = fields.table("function")
    if function is None:
        raise ApiError(f"{fields.path_of('function')} is missing", param=fields.path_of("function"))
    call = {
        "name": function.required_text("name"),
        "arguments": function.text("arguments") or "{}",
    }
    return {"id": fields.text("id") or "", "type": "function", "function": call}


def read_content(fields: Fields, name: str = "content") -> str:
    """Return a message's text. If the content is a list of parts, their texts are joined. Raises
    ApiError for a part that is not text, such as an image.
    """
    value = fields.values.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ApiError(
            f"{fields.path_of(name)} must be text or a list of parts, not {json_type(value)}",
            param=fields.path_of(name),
        )
    return "".join(_read_part(entry) for entry in fields.tables(name))


def _read_part(fields: Fields) -> str:
    part_type = fields.required_text("type")
    if part_type not in PART_FIELDS:
        raise ApiError(
            f"{fields.path}: this server reads only text, not {part_type[:40]}", param=fields.path
        )
    return fields.required_text(PART_FIELDS[part_type])
