"""ToolCallFormat: the base class of the formats of tool calls. A format recognizes and parses
calls, and says how a forced call is written.
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


# Returns new digits for an id at each call.
MakeDigits = Callable[[], str]


def random_digits() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the model. `arguments`: the arguments as JSON text."""

    name: str
    arguments: str
    id: str = ""


def parse_arguments(call: ToolCall) -> dict[str, Any] | None:
    """Return a call's arguments as an object. Return None if they were cut off or are not strict
    JSON (NaN is not).
    """
    try:
        value = parse_strict_json(call.arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The calls at the beginning of a text, and the number of characters that they occupy."""

    calls: tuple[ToolCall, ...]
    n_characters: int


class ArgumentStream(Protocol):
    """Converts a call's arguments to JSON while they arrive in pieces.

    `feed` returns the JSON of a piece of text and the number of characters it has read; `is_last`:
    no more text follows. `is_complete`: the arguments have ended, and the following text is not
    part of them.
    """

    is_complete: bool

    def feed(self, text: str, is_last: bool) -> tuple[str, int]: ...


class ArgumentFormat(ABC):
    """A format of arguments other than JSON. The two patterns match the beginning of the first call
    and of a later call in a block, as in ToolCallFormat.
    """

    first_call_pattern: str
    next_call_pattern: str

    @abstractmethod
    def open_stream(self, string_arguments: frozenset[str]) -> ArgumentStream:
        """Return a stream for one call's arguments. `string_arguments`: the arguments that are
        strings by the function's schema.
        """


@dataclass(frozen=True, slots=True)
class CallHead:
    """The beginning of a call, up to its arguments. `n_characters`: the position where the
    arguments begin; `argument_format`: the format of the arguments, None for JSON.
    """

    call: ToolCall
    n_characters: int
    argument_format: ArgumentFormat | None = None


class ToolCallFormat(ABC):
    """The format in which a model family writes tool calls.

    - `name`: name of the format.
    - `order`: formats with lower numbers are tried first.
    - `template_marks`: texts that identify the family's chat templates.
    - `openings`, `closings`: the marks that begin and end calls.
    - `starts_answer`: only text at the beginning of an answer can be a call, because the opening
      marks are too common in text.
    - `ends_answer`: no text follows the calls.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 0
    template_marks: ClassVar[tuple[str, ...]]
    openings: ClassVar[tuple[str, ...]]
    closings: ClassVar[tuple[str, ...]] = ()
    starts_answer: ClassVar[bool] = False
    ends_answer: ClassVar[bool] = False
    # Patterns for the beginning of a call with JSON arguments: for the first call of a block, and
    # for a later one. Groups: `json` (the function's name as a JSON string) or `name`, and `id`.
    first_call_pattern: ClassVar[str] = ""
    next_call_pattern: ClassVar[str] = ""
    argument_format: ClassVar[ArgumentFormat | None] = None  # format of arguments that are not JSON

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template belongs to this family."""
        return any(mark in template for mark in self.template_marks)

    @property
    def visible_marks(self) -> tuple[str, ...]:
        """The marks that must stay in an answer's text, because they are needed to find calls."""
        return (*self.openings, *self.closings)

    def make_id(self, digits: str) -> str:
        """Return the id of a new call, made from 32 hexadecimal digits."""
        return f"call_{digits[:ID_LETTERS]}"

    @property
    def block_endings(self) -> tuple[str, ...]:
        """The marks that end a block of calls; empty if a block ends only with the answer."""
        return () if self.ends_answer else self.closings[:1]

    def match_head(self, text: str, number: int) -> CallHead | None:
        """Return the head of the call that `text` begins with. Return None if there is no call, or
        if its name is incomplete. `number`: 0 for the first call of a block, greater for later
        calls.
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
        """Return the id that the model wrote for a call; empty if the model writes no ids. `id_`:
        the matched id; `number`: the number of the call in its block.
        """
        return ""

    @abstractmethod
    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        """Return the calls at the beginning of `text`, which begins with an opening mark; None if
        more text is needed. `is_last`: no more text follows.

        Raises ValueError if there is no call.
        """

    @abstractmethod
    def forced_frame(self, name: str) -> tuple[str, str]:
        """Return the text before and the text after the arguments of a forced call of the function
        `name`.
        """

    def optional_frames(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the text before and after the arguments of a call that the model may choose to
        make. The keys are the marks from which on the constraint applies.
        """
        return {self.openings[0]: self.forced_frame(name)}

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        """The text before all calls, the text between two calls (None if only one call is
        possible), and the text after all calls.
        """
        return "", "\n", ""


def json_call_pattern(
    prefix: str, name_key: str = "name", argument_keys: str = "arguments|parameters"
) -> str:
    """Return the pattern for a call that is a JSON object, up to its arguments. `prefix`: the
    pattern of the text before the object.
    """
    string = r'"(?:[^"\\]|\\.)*"'
    key = rf'"{name_key}"\s*:\s*(?P<json>{string})'
    return rf'{prefix}\{{\s*{key}\s*,\s*"(?:{argument_keys})"\s*:\s*(?=\{{)'


def make_call(name: str, values: Any, id: str = "") -> ToolCall:
    """Return a call with these arguments. Raises ValueError if `values` is not an object, or
    contains a NaN or another value that strict JSON does not have.
    """
    if not isinstance(values, dict):
        raise ValueError(values)
    return ToolCall(name, json.dumps(values, ensure_ascii=False, allow_nan=False), id)


def read_call(
    value: Any, *, name: str = "name", arguments: tuple[str, ...] = ("arguments", "parameters")
) -> ToolCall:
    """Return the call that a parsed JSON object describes. `name` and `arguments`: the keys of the
    name and of the arguments. Raises ValueError if the object describes no call.
    """
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise ValueError(value)
    values: Any = next((value[key] for key in arguments if key in value), {})
    # some models write the arguments as a JSON string that contains JSON
    if isinstance(values, str):
        values = json.loads(values)
    return make_call(value[name], values)


def read_calls(value: Any, **keys: Any) -> tuple[ToolCall, ...]:
    """Return the calls in a parsed JSON object or list of objects. Raises ValueError if there are
    none.
    """
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise ValueError(value)
    return tuple(read_call(object_, **keys) for object_ in objects)


def text_between(text: str, opening: str, closing: str, is_last: bool) -> tuple[str, int] | None:
    """Return the text between the opening mark, with which `text` begins, and the closing mark, and
    the position after the closing mark. Without a closing mark return None, or all the text if
    `is_last`: the answer has ended.
    """
    end = text.find(closing, len(opening))
    if end >= 0:
        return text[len(opening) : end], end + len(closing)
    return (text[len(opening) :], len(text)) if is_last else None


def encode_json_value(value: Any) -> str:
    r"""Return a value as JSON text. Surrogate code points are written as escapes, such as `\ud83d`,
    because UTF-8 cannot encode them; a JSON parser combines the escapes of a pair to one character.
    """
    return SURROGATE_PATTERN.sub(
        lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def escape_json(text: str) -> str:
    """Return a text as it is written inside the quotes of a JSON string."""
    return encode_json_value(text)[1:-1]
