"""Numbers the texts of a conversation, so that the prompt that a chat template writes shows which of
them it contains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmcli.runtime.text.conversation_layout import argument_values
from llmcli.runtime.text.tracked_text import ClientList, TrackedText, quoted, track_value
from llmcli.types import Message

# Variables in which templates expect the functions that the model may call.
TOOL_VARIABLES = frozenset({"tools", "xml_tools", "functions"})
MAX_NAME_LETTERS = 64  # of a function in an error message


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text of a conversation, or several of which it is enough that one is in the prompt.

    - `kind`: "content" is the text of a message, "call" the name of a called function, "arguments"
      those of the call, "tool" a function that the model may call. "other" may be left out of a
      prompt.
    - `text`: names it in an error message.
    - `message`: the number of the message, from 0; -1 for a text outside of the messages.
    """

    kind: Literal["content", "call", "arguments", "tool", "other"]
    text: str = ""
    message: int = -1


@dataclass(frozen=True, slots=True)
class TrackedConversation:
    """A conversation whose texts are TrackedTexts, and the sources that their numbers stand for."""

    messages: tuple[Message, ...]
    variables: dict[str, Any]
    sources: tuple[TextSource, ...]

    def find_losses(self, prompt: TrackedText) -> list[TextSource]:
        """Return the sources that must be in a prompt, but are not. White space need not. What the
        template has written as a Python value counts as left out, except functions that the model
        may call.
        """
        plain = prompt.plain
        shown = {source for start, end, source in prompt.spans if not plain[start:end].isspace()}
        return [
            source
            for number, source in enumerate(self.sources)
            if source.kind != "other"
            and number not in shown
            and not (source.kind == "tool" and quoted(number) in shown)
        ]

    def last_content_end(self, prompt: TrackedText) -> int:
        """Return the position in a prompt after the content of the last message, without white
        space at its end. Return 0 if the prompt does not contain it.
        """
        last = len(self.messages) - 1
        numbers = {
            number
            for number, source in enumerate(self.sources)
            if source.kind == "content" and source.message == last
        }
        plain = prompt.plain
        return max(
            (
                start + len(plain[start:end].rstrip())
                for start, end, source in prompt.spans
                if source in numbers and not plain[start:end].isspace()
            ),
            default=0,
        )


class _SourceList:
    """The sources found so far."""

    def __init__(self) -> None:
        self.sources = list[TextSource]()

    def add(self, source: TextSource) -> int:
        """Add a source and return its number."""
        self.sources.append(source)
        return len(self.sources) - 1


def track_conversation(
    messages: Sequence[Message], variables: Mapping[str, Any]
) -> TrackedConversation:
    """Return a conversation, and the client's template variables, with the sources of all texts.
    The roles of messages are no texts of the client.
    """
    sources = _SourceList()
    other = sources.add(TextSource("other"))
    tracked_messages = tuple(
        _track_message(message, number, sources, other) for number, message in enumerate(messages)
    )
    tool_numbers = dict[int, int]()
    tracked_variables = {
        name: _track_tools(value, sources, tool_numbers)
        if name in TOOL_VARIABLES and isinstance(value, (list, tuple))
        else track_value(value, other)
        for name, value in variables.items()
    }
    return TrackedConversation(tracked_messages, tracked_variables, tuple(sources.sources))


def _track_message(message: Message, number: int, sources: _SourceList, other: int) -> Message:
    place = f"message {number + 1} ({message.role})"
    content = message.content
    if _is_from_outside(content):
        content = _track_content(content, sources.add(TextSource("content", place, number)))
    template_fields = {
        name: [_track_call(call, number, place, sources, other) for call in value]
        if name == "tool_calls"
        else track_value(value, other)
        for name, value in message.template_fields.items()
    }
    return replace(message, content=content, template_fields=template_fields)


def _is_from_outside(content: str) -> bool:
    """Return whether a message's text has characters that are neither white space nor llmcli's
    own.
    """
    if not isinstance(content, TrackedText):
        return bool(content.strip())
    return any(not content.plain[start:end].isspace() for start, end, _ in content.spans)


def _track_content(content: str, source: int) -> TrackedText:
    """Return a message's text from `source`. If some of its characters are llmcli's own, only the
    others are.
    """
    if isinstance(content, TrackedText):
        return TrackedText(content, [(start, end, source) for start, end, _ in content.spans])
    return TrackedText.from_source(content, source)


def _track_call(
    call: Mapping[str, Any], number: int, place: str, sources: _SourceList, other: int
) -> dict[str, Any]:
    function = call["function"]
    name, (arguments, arguments_text) = function["name"], argument_values(function["arguments"])
    text = f"the call of {name[:MAX_NAME_LETTERS]} in {place}"
    name_source = sources.add(TextSource("call", text, number))
    arguments_source = (
        sources.add(TextSource("arguments", f"the arguments of {text}", number))
        if str(arguments or "").strip()
        else other
    )
    tracked_function = {
        "name": track_value(name, name_source),
        "arguments": track_value(arguments, arguments_source),
        "arguments_text": track_value(arguments_text, arguments_source),
    }
    return {
        key: tracked_function
        if key == "function"
        else value
        if key == "type" and value == "function"
        else track_value(value, other)
        for key, value in call.items()
    }


def _track_tools(tools: Sequence[Any], sources: _SourceList, numbers: dict[int, int]) -> Any:
    """Return definitions of functions with a source for each. `numbers`: the sources of definitions
    that were tracked before, by their position.
    """
    for position, tool in enumerate(tools):
        if position not in numbers:
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            name = str(function.get("name", "")) if isinstance(function, dict) else ""
            kind: Literal["tool", "other"] = "tool" if name else "other"
            text = f"the function {name[:MAX_NAME_LETTERS]}"
            numbers[position] = sources.add(TextSource(kind, text))
    return ClientList(track_value(tool, numbers[position]) for position, tool in enumerate(tools))
