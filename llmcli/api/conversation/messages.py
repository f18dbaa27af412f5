"""OpenAI's messages, including tool calls and their results, as models of a request and as a
conversation.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from llmcli.api.bodies.base import (
    Either,
    RequestBody,
    honored,
    ignored,
    missing,
    refused,
)
from llmcli.api.errors import ApiError
from llmcli.runtime.text.reasoning import split_thinking
from llmcli.types import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # of OpenAI's API before it had tools
}
PART_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MAX_MESSAGES = 10_000
PART_SEPARATOR = "\n"  # between the text parts of a message, as in llama-server


class ContentPart(RequestBody):
    """A part of a message. Only text is read. Other parts are refused in a message, and left out of
    the result of a tool, which the client may not be able to change.
    """

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    type: str = honored("text, input_text, output_text or refusal", ...)
    text: str | None = honored("the text of the part")
    refusal: str | None = honored("the text of a refusal")

    @model_validator(mode="after")
    def _check(self) -> "ContentPart":
        if self.is_text and getattr(self, PART_FIELDS[self.type]) is None:
            raise missing(PART_FIELDS[self.type])
        return self

    @property
    def is_text(self) -> bool:
        """Whether the part is text."""
        return self.type in PART_FIELDS

    @property
    def content(self) -> str:
        """The text of the part."""
        return str(getattr(self, PART_FIELDS[self.type]))


Content = Annotated[str | list[ContentPart], Either("text or a list of parts")]


class CalledFunction(RequestBody):
    """The function of an earlier tool call."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    name: str = honored("the function's name", ...)
    arguments: Annotated[str | dict[str, Any], Either("text or an object")] | None = honored(
        "the arguments, a JSON text"
    )


class CalledCustomTool(RequestBody):
    """The custom tool of an earlier tool call."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    name: str = honored("the tool's name", ...)
    input: str | None = honored("the text that was given to the tool")


class EarlierCall(RequestBody):
    """A tool call of an earlier answer."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    id: str | None = honored("the call's id")
    type: Any = ignored("the kind of tool is known from its field")
    function: CalledFunction | None = honored("the called function")
    custom: CalledCustomTool | None = honored("the called custom tool")

    @model_validator(mode="after")
    def _check(self) -> "EarlierCall":
        if self.function is None and self.custom is None:
            raise missing("function")
        return self

    def template_call(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        if self.function is not None:
            return template_call(self.id or "", self.function.name, self.function.arguments or {})
        assert self.custom is not None
        return template_call(self.id or "", self.custom.name, {"input": self.custom.input or ""})


class ChatMessage(RequestBody):
    """A message of a conversation."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = honored(
        "whose message it is", ...
    )
    content: Content | None = honored("the text, or a list of parts that are joined by line ends")
    name: str | None = honored("given to chat templates that show it")
    tool_calls: list[EarlierCall] | None = honored("tool calls of an earlier answer")
    function_call: CalledFunction | None = honored("the function call of an earlier answer")
    tool_call_id: str | None = honored("the id of the call whose result this is")
    reasoning_content: str | None = honored("the thinking of an earlier answer")
    reasoning: str | None = honored("the thinking of an earlier answer, in vLLM's spelling")
    refusal: Any = ignored("an earlier refusal is in content")
    audio: Any = refused("this server reads only text")

    @model_validator(mode="after")
    def _check(self) -> "ChatMessage":
        if self.role != "assistant" and self.content is None:
            raise missing("content")
        if self.role == "tool" and self.tool_call_id is None:
            raise missing("tool_call_id")
        return self

    def to_message(self, path: str, notes: list[str]) -> Message:
        """Return the message for chat templates. `path`: its path in the request, for errors.
        Notes about parts that are left out are appended to `notes`.
        """
        role = ROLES[self.role]
        text = join_parts(self.content, f"{path}.content", notes if role == "tool" else None)
        fields: dict[str, Any] = {"name": self.name} if self.name else {}
        if role == "assistant":
            if calls := self._calls():
                fields["tool_calls"] = calls
            thinking, answer = split_thinking(text)
            # templates expect earlier answers without thinking, and most templates would remove it
            # anyway
            text = answer if thinking else text
            if reasoning := self.reasoning_content or self.reasoning:
                fields["reasoning_content"] = reasoning
        if role == "tool":
            fields["tool_call_id"] = self.tool_call_id or self.name or ""
        return Message(role, text, fields)

    def _calls(self) -> list[dict[str, Any]]:
        calls = [call.template_call() for call in self.tool_calls or ()]
        if self.function_call is not None:
            function = self.function_call
            calls.append(template_call(function.name, function.name, function.arguments or {}))
        return calls


def to_conversation(messages: Sequence[ChatMessage], notes: list[str]) -> list[Message]:
    """Return the messages of a request as a conversation. Notes about parts that are left out are
    appended to `notes`. Raises ApiError if there is no message, and for a part that is not text.
    """
    if not messages:
        raise ApiError("messages is empty: at least one message is required", param="messages")
    return [
        message.to_message(f"messages[{index}]", notes) for index, message in enumerate(messages)
    ]


def template_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a tool call of a conversation. Its arguments are a JSON text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": text or "{}"},
    }


def join_parts(
    content: str | Sequence[ContentPart] | None,
    path: str,
    notes: list[str] | None,
    separator: str = PART_SEPARATOR,
) -> str:
    """Return the text of a content. `path`: its path in the request. With `notes`, a part that is
    not text is left out, and a note says so. Without, it raises ApiError.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.is_text:
            texts.append(part.content)
        else:
            texts.append(leave_out(f"{path}[{index}]", part.type, notes))
    return separator.join(texts)


def leave_out(path: str, kind: str, notes: list[str] | None) -> str:
    """Return what stands for a part that is not text, and append a note about it. Raises ApiError
    if there are no `notes`.
    """
    if notes is None:
        raise ApiError(f"{path}: this server reads only text, not {kind[:40]}", param=path)
    notes.append(f"{path} was left out: this server reads only text, not {kind[:40]}")
    return f"[{kind[:40]}]"
