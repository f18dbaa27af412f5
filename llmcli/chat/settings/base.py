"""What a knob is: a setting of the talk as `/set` lists, completes, checks and changes it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.chat_session import Talk
from llmcli.errors import UserError

SWITCH = {"off": False, "on": True}
SAMPLING, SEARCH, ANSWER, SCREEN = range(4)  # the order of `/set`'s list


class Offer(str):
    """A word that Tab offers, and what is shown beside it."""

    about: str

    def __new__(cls, word: str, about: str = "") -> "Offer":
        made = super().__new__(cls, word)
        made.about = about
        return made


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting. `range` says in words what it takes, `default` is what it starts with, as people
    write it.

    `show` gives the value in effect, `change` takes what was typed: it raises UserError with what
    to type instead, and then nothing has changed. `values` are what Tab offers.
    """

    name: str
    order: int
    help: str
    range: str
    default: str
    show: Callable[[Talk], str]
    change: Callable[[Talk, str], None]
    values: Callable[[Talk], Iterable[str]]
    aliases: tuple[str, ...] = ()


def one_of(name: str, words: Iterable[str], value: str) -> str:
    """The one of `words` that was typed; raises UserError."""
    known = tuple(words)
    if value.lower() not in known:
        raise UserError(f"{name} is {value!r}", hint=f"{name} takes one of: {', '.join(known)}")
    return value.lower()
