"""How a model family writes tool calls: recognize, parse and force one format."""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llmcli.strict_json import strict

LETTERS = 24  # letters of an id; Mistral's templates want nine


# Makes the digits of ids, new ones at each call.
Digits = Callable[[], str]


def digits() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Call:
    """A function call of the model; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = ""


def given(call: Call) -> dict[str, Any] | None:
    """Return a call's arguments, or None if they were cut off or are not JSON (NaN is not)."""
    try:
        value = strict(call.arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Taken:
    """Calls read from the beginning of a text, and how many of its characters they take."""

    calls: tuple[Call, ...]
    used: int


class Written(Protocol):
    """Converts arguments to JSON while they arrive. `feed` returns the JSON of a piece of text and
    the number of characters it has read; `is_last`: no more text follows. `is_complete`: the
    arguments are complete, and the following text is not part of them.
    """

    done: bool

    def take(self, text: str, over: bool) -> tuple[str, int]: ...


class Form(ABC):
    """A way to write arguments that is not JSON. The two patterns match the beginning of the first
    and of a later call, as in ToolCallFormat.
    """

    begins: str
    goes_on: str

    @abstractmethod
    def reader(self, texts: frozenset[str]) -> Written:
        """Return a stream for one call's arguments; `string_arguments` are those that are strings
        by its schema.
        """


@dataclass(frozen=True, slots=True)
class Head:
    """A call whose arguments begin after this many characters: a JSON object, or another argument
    format.
    """

    call: Call
    used: int
    form: Form | None = None


class Family(ABC):
    """The format in which a model family writes tool calls. `template_marks` identify its chat
    template; `openings` begin calls and `closings` end them. `starts_answer`: an answer is either a
    call from its beginning or no call, because the opening marks are too common in text.
    `ends_answer`: nothing follows the calls.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 0
    marks: ClassVar[tuple[str, ...]]
    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]] = ()
    first: ClassVar[bool] = False
    last: ClassVar[bool] = False
    # Patterns of the beginning of a call with JSON arguments: of the first call, and of a later one
    # in the same block. Groups: json (a JSON string) or name, id.
    begins: ClassVar[str] = ""
    goes_on: ClassVar[str] = ""
    form: ClassVar[Form | None] = None  # how arguments are written that are not JSON

    def fits(self, template: str) -> bool:
        """Return whether a chat template is of this family."""
        return any(mark in template for mark in self.marks)

    @property
    def words(self) -> tuple[str, ...]:
        """The marks that must not be dropped from an answer's text."""
        return (*self.opens, *self.closes)

    def id(self, digits: str) -> str:
        """Return the id of a new call, made of 32 hexadecimal digits."""
        return f"call_{digits[:LETTERS]}"

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that end a block of calls; empty if only the end of the answer does."""
        return () if self.last else self.closes[:1]

    def head(self, text: str, number: int) -> Head | None:
        """Return the call that `text` begins with, or None if its name is not complete or there is
        no call. `number`: 0 for the first call of a block, more for later ones.
        """
        for argument_format in (None, self.form):
            patterns = argument_format or self
            pattern = patterns.goes_on if number else patterns.begins
            if match := re.match(pattern, text) if pattern else None:
                break
        else:
            return None
        groups = match.groupdict()
        try:
            name = json.loads(groups["json"]) if groups.get("json") else groups["name"].strip()
        except ValueError:
            return None
        return Head(
            Call(name, "", self.named(groups.get("id"), name, number)), match.end(), argument_format
        )

    def named(self, id_: str | None, name: str, number: int) -> str:
        """Return the id that the model itself wrote for a call; empty if there is none."""
        return ""

    @abstractmethod
    def take(self, text: str, over: bool) -> Taken | None:
        """Parse the calls at the beginning of `text`, which begins with an opening mark; None if
        more text is needed. `is_last`: no more text follows.

        Raises ValueError if there is no call.
        """

    @abstractmethod
    def frame(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a forced call of `name`."""

    def bound(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the frames of a call that the model may choose to make, by the mark from which on
        the text is constrained.
        """
        return {self.opens[0]: self.frame(name)}

    @property
    def around(self) -> tuple[str, str | None, str]:
        """Text before all calls, between two (None: only one call is possible), and after all."""
        return "", "\n", ""


def keyed(before: str, name: str = "name", arguments: str = "arguments|parameters") -> str:
    """Return the pattern of a call that is a JSON object, up to its arguments. `prefix` matches
    what precedes the object.
    """
    string = r'"(?:[^"\\]|\\.)*"'
    key = rf'"{name}"\s*:\s*(?P<json>{string})'
    return rf'{before}\{{\s*{key}\s*,\s*"(?:{arguments})"\s*:\s*(?=\{{)'


def made(name: str, values: Any, id: str = "") -> Call:
    """Return a call with these arguments. Raises ValueError if they are not an object or cannot be
    strict JSON (NaN).
    """
    if not isinstance(values, dict):
        raise ValueError(values)
    return Call(name, json.dumps(values, ensure_ascii=False, allow_nan=False), id)


def call(
    value: Any, *, name: str = "name", arguments: tuple[str, ...] = ("arguments", "parameters")
) -> Call:
    """Return the call that a JSON object describes. Raises ValueError if it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise ValueError(value)
    values: Any = next((value[key] for key in arguments if key in value), {})
    if isinstance(values, str):  # JSON within a JSON string
        values = json.loads(values)
    return made(value[name], values)


def calls(value: Any, **keys: Any) -> tuple[Call, ...]:
    """Return the calls in a JSON object or list. Raises ValueError if there are none."""
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise ValueError(value)
    return tuple(call(object_, **keys) for object_ in objects)


def within(text: str, opens: str, closes: str, over: bool) -> tuple[str, int] | None:
    """Return the text between the opening mark at the beginning of `text` and the closing mark, and
    the position after it; None if the closing mark is missing. `is_last`: the answer has ended, and
    needs no closing mark.
    """
    end = text.find(closes, len(opens))
    if end >= 0:
        return text[len(opens) : end], end + len(closes)
    return (text[len(opens) :], len(text)) if over else None
