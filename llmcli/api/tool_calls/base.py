"""How a model family writes tool calls: recognize, parse and force one format."""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llmcli.strict_json import parse_strict_json

SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")

ID_LETTERS = 24  # letters of an id; Mistral's templates want nine


# Makes the digits of ids, new ones at each call.
MakeDigits = Callable[[], str]


def random_digits() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the model; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = ""


def parse_arguments(call: ToolCall) -> dict[str, Any] | None:
    """Return a call's arguments, or None if they were cut off or are not JSON (NaN is not)."""
    try:
        value = parse_strict_json(call.arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """Calls read from the beginning of a text, and how many of its characters they take."""

    calls: tuple[ToolCall, ...]
    n_characters: int


class ArgumentStream(Protocol):
    """Converts arguments to JSON while they arrive. `feed` returns the JSON of a piece of text and
    the number of characters it has read; `is_last`: no more text follows. `is_complete`: the
    arguments are complete, and the following text is not part of them.
    """

    is_complete: bool

    def feed(self, text: str, is_last: bool) -> tuple[str, int]: ...


class ArgumentFormat(ABC):
    """A way to write arguments that is not JSON. The two patterns match the beginning of the first
    and of a later call, as in ToolCallFormat.
    """

    first_call_pattern: str
    next_call_pattern: str

    @abstractmethod
    def open_stream(self, string_arguments: frozenset[str]) -> ArgumentStream:
        """Return a stream for one call's arguments; `string_arguments` are those that are strings
        by its schema.
        """


@dataclass(frozen=True, slots=True)
class CallHead:
    """A call whose arguments begin after this many characters: a JSON object, or another argument
    format.
    """

    call: ToolCall
    n_characters: int
    argument_format: ArgumentFormat | None = None


class ToolCallFormat(ABC):
    """The format in which a model family writes tool calls. `template_marks` identify its chat
    template; `openings` begin calls and `closings` end them. `starts_answer`: an answer is either a
    call from its beginning or no call, because the opening marks are too common in text.
    `ends_answer`: nothing follows the calls.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 0
    template_marks: ClassVar[tuple[str, ...]]
    openings: ClassVar[tuple[str, ...]]
    closings: ClassVar[tuple[str, ...]] = ()
    starts_answer: ClassVar[bool] = False
    ends_answer: ClassVar[bool] = False
    # Patterns of the beginning of a call with JSON arguments: of the first call, and of a later one
    # in the same block. Groups: json (a JSON string) or name, id.
    first_call_pattern: ClassVar[str] = ""
    next_call_pattern: ClassVar[str] = ""
    argument_format: ClassVar[ArgumentFormat | None] = (
        None  # how arguments are written that are not JSON
    )

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template is of this family."""
        return any(mark in template for mark in self.template_marks)

    @property
    def visible_marks(self) -> tuple[str, ...]:
        """The marks that must not be dropped from an answer's text."""
        return (*self.openings, *self.closings)

    def make_id(self, digits: str) -> str:
        """Return the id of a new call, made of 32 hexadecimal digits."""
        return f"call_{digits[:ID_LETTERS]}"

    @property
    def block_endings(self) -> tuple[str, ...]:
        """The marks that end a block of calls; empty if only the end of the answer does."""
        return () if self.ends_answer else self.closings[:1]

    def match_head(self, text: str, number: int) -> CallHead | None:
        """Return the call that `text` begins with, or None if its name is not complete or there is
        no call. `number`: 0 for the first call of a block, more for later ones.
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
        """Return the id that the model itself wrote for a call; empty if there is none."""
        return ""

    @abstractmethod
    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        """Parse the calls at the beginning of `text`, which begins with an opening mark; None if
        more text is needed. `is_last`: no more text follows.

        Raises ValueError if there is no call.
        """

    @abstractmethod
    def forced_frame(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a forced call of `name`."""

    def optional_frames(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the frames of a call that the model may choose to make, by the mark from which on
        the text is constrained.
        """
        return {self.openings[0]: self.forced_frame(name)}

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        """Text before all calls, between two (None: only one call is possible), and after all."""
        return "", "\n", ""


def json_call_pattern(
    prefix: str, name_key: str = "name", argument_keys: str = "arguments|parameters"
) -> str:
    """Return the pattern of a call that is a JSON object, up to its arguments. `prefix` matches
    what precedes the object.
    """
    string = r'"(?:[^"\\]|\\.)*"'
    key = rf'"{name_key}"\s*:\s*(?P<json>{string})'
    return rf'{prefix}\{{\s*{key}\s*,\s*"(?:{argument_keys})"\s*:\s*(?=\{{)'


def make_call(name: str, values: Any, id: str = "") -> ToolCall:
    """Return a call with these arguments. Raises ValueError if they are not an object or cannot be
    strict JSON (NaN).
    """
    if not isinstance(values, dict):
        raise ValueError(values)
    return ToolCall(name, json.dumps(values, ensure_ascii=False, allow_nan=False), id)


def read_call(
    value: Any, *, name: str = "name", arguments: tuple[str, ...] = ("arguments", "parameters")
) -> ToolCall:
    """Return the call that a JSON object describes. Raises ValueError if it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise ValueError(value)
    values: Any = next((value[key] for key in arguments if key in value), {})
    if isinstance(values, str):  # JSON within a JSON string
        values = json.loads(values)
    return make_call(value[name], values)


def read_calls(value: Any, **keys: Any) -> tuple[ToolCall, ...]:
    """Return the calls in a JSON object or list. Raises ValueError if there are none."""
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise ValueError(value)
    return tuple(read_call(object_, **keys) for object_ in objects)


def text_between(text: str, opening: str, closing: str, is_last: bool) -> tuple[str, int] | None:
    """Return the text between the opening mark at the beginning of `text` and the closing mark, and
    the position after it; None if the closing mark is missing. `is_last`: the answer has ended, and
    needs no closing mark.
    """
    end = text.find(closing, len(opening))
    if end >= 0:
        return text[len(opening) : end], end + len(closing)
    return (text[len(opening) :], len(text)) if is_last else None


def encode_json_value(value: Any) -> str:
    """Return JSON in which lone surrogates are escaped: two of them make a character, and alone
    they are not valid UTF-8.
    """
    return SURROGATE_PATTERN.sub(
        lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def escape_json(text: str) -> str:
    """Return a text as the inside of a JSON string."""
    return encode_json_value(text)[1:-1]
