"""The input of `/v1/responses`, a text or a list of items, as models of a request and as a
conversation.

Clients send the items of earlier answers back, also those of tools that only OpenAI's server runs.
Calls of functions and of custom tools, and their results, reach the model; items of other tools are
left out with a note.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from llmcli.api.bodies.base import Either, RequestBody, honored, ignored, missing
from llmcli.api.conversation.messages import ROLES, Content, join_parts, template_call
from llmcli.api.conversation.tool_fields import CUSTOM_ARGUMENT
from llmcli.api.conversation.tools import NAMESPACE_SEPARATOR
from llmcli.api.errors import ApiError
from llmcli.types import Message

# type of an item -> the fields that it must have
REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role",),
    "function_call": ("name", "call_id"),
    "function_call_output": ("call_id",),
    "custom_tool_call": ("name", "call_id"),
    "custom_tool_call_output": ("call_id",),
}
OUTPUT_ITEMS = ("function_call_output", "custom_tool_call_output")
READ_ITEMS = (*REQUIRED_FIELDS, None)  # types of items that are read
Json = Annotated[str | dict[str, Any], Either("text or an object")]


class InputItem(RequestBody):
    """An item of the input."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    type: str | None = honored(
        "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output or"
        " reasoning; items of other types are left out"
    )
    role: Literal["system", "developer", "user", "assistant"] | None = honored("of a message")
    content: Content | None = honored(
        "of a message: the text, or a list of parts joined by line ends"
    )
    call_id: str | None = honored("of a call or its output")
    name: str | None = honored("the called function or custom tool")
    namespace: str | None = honored("the namespace of the called function")
    arguments: Json | None = honored("the arguments of a call, a JSON text")
    input: str | None = honored("the text that was given to a custom tool")
    output: Content | None = honored("the output of a call: a text, or a list of parts")
    id: Any = ignored("items have no identity between two requests")
    status: Any = ignored("items of earlier answers are complete")
    summary: Any = ignored("the model does not receive earlier reasoning")

    @model_validator(mode="before")
    @classmethod
    def _drop_unread_fields(cls, values: Any) -> Any:
        """Return only the type of an item that is not read: its fields may have any form."""
        if isinstance(values, dict) and values.get("type", "message") not in READ_ITEMS:
            return {"type": values["type"]}
        return values

    @model_validator(mode="after")
    def _check(self) -> "InputItem":
        for name in REQUIRED_FIELDS.get(self.kind, ()):
            if getattr(self, name) is None:
                raise missing(name)
        return self

    @property
    def kind(self) -> str:
        """The type of the item; `message` if it has none."""
        return self.type or "message"


Input = Annotated[str | list[InputItem], Either("text or a list of items")]


def read_conversation(
    instructions: str | None, value: str | Sequence[InputItem], notes: list[str]
) -> list[Message]:
    """Return the conversation in the fields `instructions` (the system text) and `input`. Notes
    about what is left out are appended to `notes`. Raises ApiError for an empty input.
    """
    messages = [Message("system", instructions)] if instructions else []
    if isinstance(value, str):
        return [*messages, Message("user", value)]
    if not value:
        raise ApiError("input must be text or a list of items, not a list", param="input")
    for index, item in enumerate(value):
        _add_item(item, f"input[{index}]", messages, notes)
    return messages


def _add_item(item: InputItem, path: str, messages: list[Message], notes: list[str]) -> None:
    """Append an item of the input to the conversation `messages`. `path`: its path there."""
    kind = item.kind
    if kind == "message":
        messages.append(
            Message(ROLES[item.role or "user"], join_parts(item.content, f"{path}.content", None))
        )
    elif kind == "function_call":
        name = f"{item.namespace}{NAMESPACE_SEPARATOR}{item.name}" if item.namespace else item.name
        _add_call(item, name or "", item.arguments or {}, messages)
    elif kind == "custom_tool_call":
        _add_call(item, item.name or "", {CUSTOM_ARGUMENT: item.input or ""}, messages)
    elif kind in OUTPUT_ITEMS:
        text = join_parts(item.output, f"{path}.output", notes)
        messages.append(Message("tool", text, {"tool_call_id": item.call_id}))
    elif kind != "reasoning":  # the model does not receive earlier reasoning
        notes.append(f"{path} was left out: this server has no items of type {kind[:40]}")


def _add_call(
    item: InputItem, name: str, arguments: str | dict[str, Any], messages: list[Message]
) -> None:
    """Append a call to the last message if that is the assistant's; otherwise append a new message
    with the call. Templates expect all calls of a turn in one message.
    """
    call = template_call(item.call_id or "", name, arguments)
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        calls = [*last.template_fields.get("tool_calls", ()), call]
        messages.append(
            Message("assistant", last.content, {**last.template_fields, "tool_calls": calls})
        )
    else:
        messages.append(Message("assistant", "", {"tool_calls": [call]}))
