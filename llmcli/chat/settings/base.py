"""The interface of a setting: how `/set` lists, completes, checks and changes it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.chat_session import ChatSession
from llmcli.errors import UserError

SWITCH_WORDS = {"off": False, "on": True}
# the order of the groups in `/set`'s list
SAMPLING_GROUP, SEARCH_GROUP, ANSWER_GROUP, DISPLAY_GROUP = range(4)


class Completion(str):
    """A word that Tab offers, with a description."""

    description: str

    def __new__(cls, word: str, about: str = "") -> "Completion":
        offer = super().__new__(cls, word)
        offer.description = about
        return offer


@dataclass(frozen=True, slots=True)
class ChatSetting:
    """One setting.

    - `range`: the accepted values, in words; `default`: the initial value, as text.
    - `format_value`: returns the current value as text.
    - `set_value`: sets the typed value. Raises UserError for an invalid value; then nothing has
      changed.
    - `offered_values`: returns the values that Tab offers.
    """

    name: str
    group: int
    help: str
    range: str
    default: str
    format_value: Callable[[ChatSession], str]
    set_value: Callable[[ChatSession, str], None]
    offered_values: Callable[[ChatSession], Iterable[str]]
    aliases: tuple[str, ...] = ()


def parse_choice(name: str, words: Iterable[str], value: str) -> str:
    """Return the typed word, if it is one of `words`. Raises UserError."""
    choices = tuple(words)
    if value.lower() not in choices:
        raise UserError(
            f"{value!r} is not a value of {name}",
            hint=f"{name} takes one of: {', '.join(choices)}",
        )
    return value.lower()
