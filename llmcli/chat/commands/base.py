"""What a REPL command is: a word, a function, and the words that may follow it."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.chat_session import Talk

GROUPS = ("conversation", "model and settings", "inside the model", "files", "this program")


def nothing(talk: Talk) -> Iterable[str]:
    """No argument can be completed."""
    return ()


def nothing_more(talk: Talk, words: list[str]) -> Iterable[str]:
    """No argument after the first can be completed."""
    return ()


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `run` gets the talk and the rest of the line; its docstring is the help, the
    first line by itself in the list of `group` (one of GROUPS).

    `args` shows what follows the word, `completions` gives the first arguments that Tab offers,
    `further` those after the words that stand there already. `endings`, where there is one, takes
    their place: from all that was typed after the command's word, what it may become.
    """

    name: str
    run: Callable[[Talk, str], None]
    args: str = ""
    aliases: tuple[str, ...] = ()
    completions: Callable[[Talk], Iterable[str]] = nothing
    further: Callable[[Talk, list[str]], Iterable[str]] = nothing_more
    endings: Callable[[Talk, str], Iterable[str]] | None = None
    group: str = GROUPS[0]

    @property
    def help(self) -> str:
        """One line about it."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    @property
    def details(self) -> str:
        """All that its docstring says after the first line."""
        return "\n".join(inspect.cleandoc(self.run.__doc__ or "").split("\n")[1:]).strip()

    @property
    def words(self) -> tuple[str, ...]:
        """Every spelling, the name first."""
        return (self.name, *self.aliases)
