"""What a family is: where its calls begin, how to read them, and what to write around forced
arguments.
"""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llmcli.strict import strict

LETTERS = 24  # of an id; Mistral's templates want nine


# The digits of ids, new ones at each call.
Digits = Callable[[], str]


def digits() -> str:
    """Such as nobody else has."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Call:
    """A function that the model wants to be called; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = ""


def given(call: Call) -> dict[str, Any] | None:
    """A call's arguments; None where they were cut off or are no JSON, which NaN is not."""
    try:
        found = strict(call.arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class Taken:
    """Calls read from the beginning of a text, and how many of its characters they were."""

    calls: tuple[Call, ...]
    used: int


class Written(Protocol):
    """Arguments on their way: `take` says what of a text tells of them, as JSON, and how many
    characters that were; `over`: there is no more. `done`: they are all told, and what follows is
    none of them.
    """

    done: bool

    def take(self, text: str, over: bool) -> tuple[str, int]: ...


class Form(ABC):
    """How arguments are written that are no JSON: `begins` and `goes_on` are patterns as a family
    has them.
    """

    begins: str
    goes_on: str

    @abstractmethod
    def reader(self, texts: frozenset[str]) -> Written:
        """Of one call's arguments, of which `texts` are text by its schema."""


@dataclass(frozen=True, slots=True)
class Head:
    """A call whose arguments begin behind `used` characters: a JSON object, or in another `form`."""

    call: Call
    used: int
    form: Form | None = None


class Family(ABC):
    """`marks` are what its template has, `opens` what its calls begin with, `closes` what ends
    them. `first`: a call is all of the answer, or none; its opening is too common to mean one
    anywhere. `last`: nothing follows its calls.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 0
    marks: ClassVar[tuple[str, ...]]
    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]] = ()
    first: ClassVar[bool] = False
    last: ClassVar[bool] = False
    # How a call begins whose arguments are JSON, up to them: at the mark, and behind another call.
    # Groups: json or name, id.
    begins: ClassVar[str] = ""
    goes_on: ClassVar[str] = ""
    form: ClassVar[Form | None] = None  # how they are written that are no JSON

    def fits(self, template: str) -> bool:
        """Whether a chat template is of this family."""
        return any(mark in template for mark in self.marks)

    @property
    def words(self) -> tuple[str, ...]:
        """What must be seen in an answer."""
        return (*self.opens, *self.closes)

    def id(self, digits: str) -> str:
        """A new call's id, made of 32 hexadecimal digits."""
        return f"call_{digits[:LETTERS]}"

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends calls; none: the end of the answer does."""
        return () if self.last else self.closes[:1]

    def head(self, text: str, number: int) -> Head | None:
        """The call that `text` begins with, the first (0) or a later one of several, where it is
        known by name.
        """
        for form in (None, self.form):
            kind = form or self
            pattern = kind.goes_on if number else kind.begins
            if found := re.match(pattern, text) if pattern else None:
                break
        else:
            return None
        groups = found.groupdict()
        try:
            name = json.loads(groups["json"]) if groups.get("json") else groups["name"].strip()
        except ValueError:
            return None
        return Head(Call(name, "", self.named(groups.get("id"), name, number)), found.end(), form)

    def named(self, given: str | None, name: str, number: int) -> str:
        """The id of a call, where it is the model's own."""
        return ""

    @abstractmethod
    def take(self, text: str, over: bool) -> Taken | None:
        """Read `text`, which begins with one of `opens`; None: more must come, which it does unless
        `over`.

        Raises ValueError where that is no call.
        """

    @abstractmethod
    def frame(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call of `name`, where one is forced."""

    def bound(self, name: str) -> dict[str, tuple[str, str]]:
        """The same by the mark that tells of a call, where one may be made, and is bound from there
        on.
        """
        return {self.opens[0]: self.frame(name)}

    @property
    def around(self) -> tuple[str, str | None, str]:
        """What stands before all calls, between two (None: there is only one), and behind all."""
        return "", "\n", ""


def keyed(before: str, name: str = "name", arguments: str = "arguments|parameters") -> str:
    """The pattern of a call that is a JSON object, behind what `before` matches, up to its
    arguments.
    """
    return rf'{before}\{{\s*"{name}"\s*:\s*(?P<json>"(?:[^"\\]|\\.)*")\s*,\s*"(?:{arguments})"\s*:\s*(?=\{{)'


def made(name: str, given: Any, id: str = "") -> Call:
    """A call with these arguments; raises ValueError where they are no object, or hold what is no
    JSON (NaN).
    """
    if not isinstance(given, dict):
        raise ValueError(given)
    return Call(name, json.dumps(given, ensure_ascii=False, allow_nan=False), id)


def call(
    found: Any, *, name: str = "name", arguments: tuple[str, ...] = ("arguments", "parameters")
) -> Call:
    """A call of a JSON object; raises ValueError where it is none."""
    if not isinstance(found, dict) or not isinstance(found.get(name), str):
        raise ValueError(found)
    given: Any = next((found[one] for one in arguments if one in found), {})
    if isinstance(given, str):  # JSON within JSON
        given = json.loads(given)
    return made(found[name], given)


def calls(found: Any, **keys: Any) -> tuple[Call, ...]:
    """The calls of a JSON object or list; raises ValueError where there are none."""
    several = found if isinstance(found, list) else [found]
    if not several:
        raise ValueError(found)
    return tuple(call(one, **keys) for one in several)


def within(text: str, opens: str, closes: str, over: bool) -> tuple[str, int] | None:
    """What stands between the opening that `text` begins with and the end, and where it ends; None:
    not there yet.

    Where the answer is over it may do without an end.
    """
    end = text.find(closes, len(opens))
    if end >= 0:
        return text[len(opens) : end], end + len(closes)
    return (text[len(opens) :], len(text)) if over else None
