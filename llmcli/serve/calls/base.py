"""What a family is: where its calls begin, how they are read, and what stands around forced arguments."""

import json
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

LETTERS = 24  # of an id; Mistral's templates want nine


@dataclass(frozen=True, slots=True)
class Call:
    """A function that the model wants to be called; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """Calls read from the beginning of a text, and how many of its characters they were."""

    calls: tuple[Call, ...]
    used: int


class Family(ABC):
    """`marks` are what its template has, `opens` what its calls begin with, `closes` what ends them. `first`: a call is
    all of the answer, or none; its opening is too common to mean one anywhere. `last`: nothing follows its calls."""

    name: ClassVar[str]
    order: ClassVar[int] = 0
    marks: ClassVar[tuple[str, ...]]
    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]] = ()
    first: ClassVar[bool] = False
    last: ClassVar[bool] = False

    def fits(self, template: str) -> bool:
        """Whether a chat template is of this family."""
        return any(mark in template for mark in self.marks)

    @property
    def words(self) -> tuple[str, ...]:
        """What must be seen in an answer."""
        return (*self.opens, *self.closes)

    def id(self) -> str:
        """A new call's id."""
        return f"call_{uuid.uuid4().hex[:LETTERS]}"

    @abstractmethod
    def take(self, text: str, over: bool) -> Taken | None:
        """Read `text`, which begins with one of `opens`; None: more must come, which it does unless `over`.

        Raises ValueError where that is no call.
        """

    @abstractmethod
    def frame(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call of `name`, where one is forced."""

    def bound(self, name: str) -> dict[str, tuple[str, str]]:
        """The same by the mark that tells of a call, where one may be made, and is bound from there on."""
        return {self.opens[0]: self.frame(name)}

    @property
    def around(self) -> tuple[str, str | None, str]:
        """What stands before all calls, between two (None: there is only one), and behind all."""
        return "", "\n", ""


def call(found: Any, *, name: str = "name", arguments: tuple[str, ...] = ("arguments", "parameters")) -> Call:
    """A call of a JSON object; raises ValueError where it is none."""
    if not isinstance(found, dict) or not isinstance(found.get(name), str):
        raise ValueError(found)
    given: Any = next((found[one] for one in arguments if one in found), {})
    if isinstance(given, str):  # JSON within JSON
        given = json.loads(given)
    if not isinstance(given, dict):
        raise ValueError(given)
    return Call(found[name], json.dumps(given, ensure_ascii=False))


def calls(found: Any, **keys: Any) -> tuple[Call, ...]:
    """The calls of a JSON object or list; raises ValueError where there are none."""
    several = found if isinstance(found, list) else [found]
    if not several:
        raise ValueError(found)
    return tuple(call(one, **keys) for one in several)


def within(text: str, opens: str, closes: str, over: bool) -> tuple[str, int] | None:
    """What stands between the opening that `text` begins with and the end, and where it ends; None: not there yet.

    Where the answer is over it may do without an end.
    """
    end = text.find(closes, len(opens))
    if end >= 0:
        return text[len(opens) : end], end + len(closes)
    return (text[len(opens) :], len(text)) if over else None
