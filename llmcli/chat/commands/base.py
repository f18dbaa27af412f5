"""The description of a REPL command: its name, the function that runs it, and its completions."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcli.chat.chat_session import ChatSession

GROUPS = ("conversation", "model and settings", "inside the model", "files", "this program")


def no_completions(chat: ChatSession) -> Iterable[str]:
    """Return no completions, for a command without arguments to choose from."""
    return ()


def no_later_completions(chat: ChatSession, words: list[str]) -> Iterable[str]:
    """Return no completions, for a command with at most one argument to choose from."""
    return ()


@dataclass(frozen=True, slots=True)
class ReplCommand:
    """A command of the REPL.

    - `run`: function that runs the command. Takes the chat session and the text after the command's
      name. Its docstring is the help text of `/help NAME`.
    - `args`: the arguments, as the help shows them.
    - `first_completions`: function that returns what Tab offers as the first argument.
    - `later_completions`: function that takes the arguments typed so far, and returns what Tab
      offers as the next one.
    - `line_completions`: if set, used instead of the other two functions. Takes the complete text
      after the command's name, and returns what Tab offers in its place.
    - `group`: the heading of GROUPS under which `/help` lists the command.
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
        """The first line of the help text, which the list of commands shows."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    @property
    def details(self) -> str:
        """The help text without its first line."""
        return "\n".join(inspect.cleandoc(self.run.__doc__ or "").split("\n")[1:]).strip()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The name and all aliases."""
        return (self.name, *self.aliases)
