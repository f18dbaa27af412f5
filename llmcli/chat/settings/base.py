"""The interface of a setting: how `/set` lists, completes, checks and changes it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.chat_session import Talk
from llmcli.errors import UserError

SWITCH = {"off": False, "on": True}
SAMPLING, SEARCH, ANSWER, SCREEN = range(4)  # the order of the groups in `/set`'s list


class Offer(str):
    """A word that Tab offers, with a description."""

    about: str

    def __new__(cls, word: str, about: str = "") -> "Offer":
        offer = super().__new__(cls, word)
        offer.about = about
        return offer


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting.

    - `range`: the accepted values, in words; `default`: the initial value, as text.
    - `show`: returns the current value as text.
    - `change`: sets the typed value. Raises UserError for an invalid one; then nothing has changed.
    - `values`: the values that Tab offers.
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
    """Return the typed word, if it is one of `words`. Raises UserError."""
    choices = tuple(words)
    if value.lower() not in choices:
        raise UserError(
            f"{value!r} is not a value of {name}",
            hint=f"{name} takes one of: {', '.join(choices)}",
        )
    return value.lower()
