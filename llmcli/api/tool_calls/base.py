"""ToolCallFormat: the base class of the formats in which models write tool calls. A format
recognizes and parses calls, and defines the text around the arguments of a call that a grammar
forces.
"""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llmcli.strict_json import parse_strict_json

SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")

ID_LETTERS = 24  # letters of an id, except in Mistral's format


MakeDigits = Callable[[], str]  # returns 32 hexadecimal digits for a new id


def random_digits() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model wrote. `name`: the function's name. `arguments`: the arguments as
    JSON text, which may be cut off or invalid. `id`: "" until the call has an id.
    """

    name: str
    arguments: str
    id: str = ""


def parse_arguments(call: ToolCall) -> dict[str, Any] | None:
    """Return a call's arguments as an object, or None if they were cut off or are not strict JSON
    (which has no NaN).
    """
    try:
        value = parse_strict_json(call.arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The calls at the beginning of a text, and the number of characters that they occupy in it."""

    calls: tuple[ToolCall, ...]
    n_characters: int


class ArgumentStream(Protocol):
    """Converts a call's arguments to JSON while they arrive in pieces.

    feed() returns the JSON for a piece of text and the number of characters that it has read; the
    caller passes the unread characters again with the next piece. `is_last`: no more text follows.
    `is_complete`: the arguments have ended, and the unread text does not belong to them.
    """

    is_complete: bool

    def feed(self, text: str, is_last: bool) -> tuple[str, int]: ...


class ArgumentFormat(ABC):
    """A format of a call's arguments that is not JSON. The two patterns match the text up to the
    arguments: `first_call_pattern` for the first call of a block, `next_call_pattern` for a later
    call.
    """

    first_call_pattern: str
    next_call_pattern: str

    @abstractmethod
    def open_stream(self, string_arguments: frozenset[str]) -> ArgumentStream:
        """Return a converter for one call's arguments. `string_arguments`: the names of the
        arguments that the function's schema declares as strings.
        """


@dataclass(frozen=True, slots=True)
class CallHead:
    """The recognized beginning of a call, up to its arguments.

    `call`: the call without arguments. `n_characters`: the position where the arguments begin.
    `argument_format`: the format of the arguments; None for JSON.
    """

    call: ToolCall
    n_characters: int
    argument_format: ArgumentFormat | None = None


class ToolCallFormat(ABC):
    """The format in which one family of models writes tool calls. A block is a sequence of calls
    that follow each other; a mark is a fixed text such as `<tool_call>`.

    - `name`: the name of the format.
    - `order`: formats with lower numbers are tried first.
    - `template_marks`: texts that occur only in the family's chat templates.
    - `openings`, `closings`: the marks that begin and end blocks or calls.
    - `starts_answer`: a call is only recognized at the beginning of an answer, because its opening
      mark is common in ordinary text.
    - `ends_answer`: after the calls, the answer contains no more text.
    - `tags_only`: the same format without the calls that no grammar can hold to a schema; None:
      there are no such calls.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 0
    template_marks: ClassVar[tuple[str, ...]]
    openings: ClassVar[tuple[str, ...]]
    closings: ClassVar[tuple[str, ...]] = ()
    starts_answer: ClassVar[bool] = False
    ends_answer: ClassVar[bool] = False
    tags_only: ClassVar["ToolCallFormat | None"] = None
    # Patterns for the head of a call with JSON arguments: for the first call of a block, and for a
    # later call. Groups: the function's name in `name`, or as a JSON string in `json`; and `id`.
    first_call_pattern: ClassVar[str] = ""
    next_call_pattern: ClassVar[str] = ""
    argument_format: ClassVar[ArgumentFormat | None] = None  # format of arguments that are not JSON

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template belongs to this family."""
        return any(mark in template for mark in self.template_marks)

    @property
    def visible_marks(self) -> tuple[str, ...]:
        """The marks that must stay in an answer's text, even if they are control tokens, because
        calls are recognized by them.
        """
        return (*self.openings, *self.closings)

    def make_id(self, digits: str) -> str:
        """Return the id of a new call from 32 hexadecimal digits."""
        return f"call_{digits[:ID_LETTERS]}"

    @property
    def block_endings(self) -> tuple[str, ...]:
        """The marks that end a block of calls; empty if a block ends only with the answer."""
        return () if self.ends_answer else self.closings[:1]

    def match_head(self, text: str, number: int) -> CallHead | None:
        """Return the head of the call that `text` begins with. Return None if no call begins there,
        or if the head is incomplete. `number`: the number of the call in its block, from 0.
        """
        for argument_format in (None, self.argument_format):
            patterns = argument_format or self
            pattern = patterns.next_call_pattern if number else patterns.first_call_pattern
            if match := re.match(pattern, text) if pattern else None:
                break
        else:
            return None
        groups = match.groupdict()
        try:
            name = json.loads(groups["json"]) if groups.get("json") else groups["name"].strip()
        except ValueError:
            return None
        return CallHead(
            ToolCall(name, "", self.model_id(groups.get("id"), name, number)),
            match.end(),
            argument_format,
        )

    def model_id(self, id_: str | None, name: str, number: int) -> str:
        """Return the id that the model wrote for a call; "" if models of this family write no ids.
        `id_`: the matched id; `number`: the number of the call in its block, from 0.
        """
        return ""

    @abstractmethod
    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        """Parse the calls at the beginning of `text`, which begins with an opening mark. Return
        None if more text is needed. `is_last`: no more text follows.

        Raises ValueError if there is no call.
        """

    @abstractmethod
    def forced_frame(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call of the function `name` that a
        grammar forces.
        """

    def optional_frames(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the texts before and after the arguments of a call that the model is free to make.
        The keys are the opening marks with which it may begin; from the mark on, a grammar
        constrains the call.
        """
        return {self.openings[0]: self.forced_frame(name)}

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        """The texts around forced calls: before the first call, between two calls (None if only one
        call is possible), and after the last call.
        """
        return "", "\n", ""


def json_call_pattern(
    prefix: str, name_key: str = "name", argument_keys: str = "arguments|parameters"
) -> str:
    """Return the pattern for a call that is a JSON object, up to its arguments. `prefix`: the
    pattern of the text before the object. `name_key`, `argument_keys`: patterns of the object's
    keys.
    """
    string = r'"(?:[^"\\]|\\.)*"'
    key = rf'"{name_key}"\s*:\s*(?P<json>{string})'
    return rf'{prefix}\{{\s*{key}\s*,\s*"(?:{argument_keys})"\s*:\s*(?=\{{)'


def make_call(name: str, values: Any, id: str = "") -> ToolCall:
    """Return a call with these arguments. Raises ValueError if `values` is not an object, or
    contains a value that strict JSON does not have, such as NaN.
    """
    if not isinstance(values, dict):
        raise ValueError(values)
    return ToolCall(name, json.dumps(values, ensure_ascii=False, allow_nan=False), id)


def read_call(
    value: Any, *, name: str = "name", arguments: tuple[str, ...] = ("arguments", "parameters")
) -> ToolCall:
    """Return the call that a parsed JSON object describes. `name`: the key of the function's name.
    `arguments`: the possible keys of the arguments. Raises ValueError if the object does not
    describe a call.
    """
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise ValueError(value)
    values: Any = next((value[key] for key in arguments if key in value), {})
    # some models write the arguments as a JSON string that contains JSON
    if isinstance(values, str):
        values = json.loads(values)
    return make_call(value[name], values)


def read_calls(value: Any, **keys: Any) -> tuple[ToolCall, ...]:
    """Return the calls that a parsed JSON object or list of objects describes. `keys`: passed to
    read_call. Raises ValueError if there is no call.
    """
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise ValueError(value)
    return tuple(read_call(object_, **keys) for object_ in objects)


def text_between(text: str, opening: str, closing: str, is_last: bool) -> tuple[str, int] | None:
    """Return the text between `opening`, with which `text` begins, and `closing`, and the position
    after `closing`. If `closing` is missing, return None, or the whole remaining text if the answer
    has ended (`is_last`).
    """
    end = text.find(closing, len(opening))
    if end >= 0:
        return text[len(opening) : end], end + len(closing)
    return (text[len(opening) :], len(text)) if is_last else None


def encode_json_value(value: Any) -> str:
    """Return a value as JSON text. Surrogate code points are written as escapes such as `\ud83d`,
    because UTF-8 cannot encode them. A JSON parser combines the two escapes of a pair to one
    character.
    """
    return SURROGATE_PATTERN.sub(
        lambda surrogate: f"\\u{ord(surrogate[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def escape_json(text: str) -> str:
    """Escape a text so that it can be written between the quotes of a JSON string."""
    return encode_json_value(text)[1:-1]
