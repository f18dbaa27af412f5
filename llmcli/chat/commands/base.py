"""What a REPL command is: a word, a function, and the words that may follow it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.talk import Talk


def nothing(talk: Talk) -> Iterable[str]:
    """No argument can be completed."""
    return ()


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `run` gets the talk and the rest of the line; its docstring's first line is the help.

    `args` shows what follows the word, `completions` gives the arguments that Tab offers.
    """

    name: str
    run: Callable[[Talk, str], None]
    args: str = ""
    aliases: tuple[str, ...] = ()
    completions: Callable[[Talk], Iterable[str]] = nothing

    @property
    def help(self) -> str:
        """One line about it."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    @property
    def words(self) -> tuple[str, ...]:
        """Every spelling, the name first."""
        return (self.name, *self.aliases)
