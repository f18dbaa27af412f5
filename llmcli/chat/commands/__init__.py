"""The REPL's commands; each module of this folder exports COMMANDS."""

import functools
from difflib import get_close_matches

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.errors import UserError
from quant.registry import collect


@functools.cache
def commands() -> dict[str, Command]:
    """Return every command by name."""
    return collect("llmcli.chat.commands", "COMMANDS")


@functools.cache
def words() -> dict[str, Command]:
    """Return every command by each of its spellings."""
    table: dict[str, Command] = {}
    for command in commands().values():
        for word in command.words:
            assert word not in table, f"/{word} is two commands"
            table[word] = command
    return table


def perform(chat: Talk, line: str) -> None:
    """Run a line that starts with a slash. Raises UserError that suggests a similar command."""
    word, _, rest = line.strip().removeprefix("/").partition(" ")
    command = words().get(word.lower())
    if command is None:
        near = get_close_matches(word.lower(), words(), 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists the commands."
        raise UserError(
            f"no command called /{word}",
            hint=f"{hint} Begin a message that starts with a slash with two slashes.",
        )
    command.run(chat, rest.strip())
