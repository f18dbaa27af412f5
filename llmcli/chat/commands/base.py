"""The interface of a REPL command: a word, a function, and its arguments."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.chat_session import ChatSession

GROUPS = ("conversation", "model and settings", "inside the model", "files", "this program")


def no_completions(chat: ChatSession) -> Iterable[str]:
    """Offer no completions."""
    return ()


def no_later_completions(chat: ChatSession, words: list[str]) -> Iterable[str]:
    """Offer no completions after the first argument."""
    return ()


@dataclass(frozen=True, slots=True)
class ReplCommand:
    """One command.

    - `run`: takes the chat session and the rest of the line. Its docstring is the help text; the
      first line also appears in the list of `group` (one of GROUPS).
    - `args`: the arguments, as shown in the help.
    - `first_completions`: returns what Tab offers as the first argument.
    - `later_completions`: takes the arguments typed so far, and returns what Tab offers after them.
    - `line_completions`: is used instead of both; takes the text after the command's word, and
      returns what Tab offers for it.
    """

    name: str
    run: Callable[[ChatSession, str], None]
    args: str = ""
    aliases: tuple[str, ...] = ()
    first_completions: Callable[[ChatSession], Iterable[str]] = no_completions
    later_completions: Callable[[ChatSession, list[str]], Iterable[str]] = no_later_completions
    line_completions: Callable[[ChatSession, str], Iterable[str]] | None = None
    group: str = GROUPS[0]

    @property
    def help(self) -> str:
        """The first line of the help text."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    @property
    def details(self) -> str:
        """The help text after its first line."""
        return "\n".join(inspect.cleandoc(self.run.__doc__ or "").split("\n")[1:]).strip()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling, the name first."""
        return (self.name, *self.aliases)
