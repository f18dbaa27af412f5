"""What a REPL command is: a word, a function, and the words that may follow it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.talk import Talk


def nothing(talk: Talk) -> Iterable[str]:
    """No argument can be completed."""
    return ()


def nothing_more(talk: Talk, words: list[str]) -> Iterable[str]:
    """No argument after the first can be completed."""
    return ()


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `run` gets the talk and the rest of the line; its docstring's first line is the help.

    `args` shows what follows the word, `completions` gives the first arguments that Tab offers, `further` those
    after the words that stand there already.
    """

    name: str
    run: Callable[[Talk, str], None]
    args: str = ""
    aliases: tuple[str, ...] = ()
    completions: Callable[[Talk], Iterable[str]] = nothing
    further: Callable[[Talk, list[str]], Iterable[str]] = nothing_more

    @property
    def help(self) -> str:
        """One line about it."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    @property
    def words(self) -> tuple[str, ...]:
        """Every spelling, the name first."""
        return (self.name, *self.aliases)
