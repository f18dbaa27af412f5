"""The description of a setting of the chat: how `/set` shows, completes, checks and changes it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.chat_session import ChatSession
from llmcli.errors import UserError

SWITCH_WORDS = {"off": False, "on": True}
# Groups of settings, in the order in which `/set` lists them.
SAMPLING_GROUP, SEARCH_GROUP, ANSWER_GROUP, DISPLAY_GROUP = range(4)


class Completion(str):
    """A word that Tab offers. `description`: text that the menu shows beside it."""

    description: str

    def __new__(cls, word: str, about: str = "") -> "Completion":
        offer = super().__new__(cls, word)
        offer.description = about
        return offer


@dataclass(frozen=True, slots=True)
class ChatSetting:
    """A setting of the chat.

    - `group`: one of the groups above. `help`: what the setting means.
    - `range`: the accepted values, in words. `default`: the initial value, as text.
    - `format_value`: function that returns the current value as text.
    - `set_value`: function that sets the value that the user typed. Raises UserError if it is
      invalid, and then changes nothing.
    - `offered_values`: function that returns the values that Tab offers.
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
    """Return `value` in lower case if it is one of `words`. Otherwise raise UserError that lists
    the words. `name`: name of the setting.
    """
    choices = tuple(words)
    if value.lower() not in choices:
        raise UserError(
            f"{value!r} is not a value of {name}",
            hint=f"{name} takes one of: {', '.join(choices)}",
        )
    return value.lower()
