"""The REPL's commands; each module of this folder exports COMMANDS."""

import functools
from difflib import get_close_matches

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError
from quant.registry import collect


@functools.cache
def commands() -> dict[str, ReplCommand]:
    """Return every command by name."""
    return collect("llmcli.chat.commands", "COMMANDS")


@functools.cache
def commands_by_word() -> dict[str, ReplCommand]:
    """Return every command by each of its spellings."""
    table: dict[str, ReplCommand] = {}
    for command in commands().values():
        for word in command.spellings:
            assert word not in table, f"/{word} is two commands"
            table[word] = command
    return table


def run_command(chat: ChatSession, line: str) -> None:
    """Run a line that starts with a slash. Raises UserError that suggests a similar command."""
    word, _, argument = line.strip().removeprefix("/").partition(" ")
    command = commands_by_word().get(word.lower())
    if command is None:
        near = get_close_matches(word.lower(), commands_by_word(), 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists the commands."
        raise UserError(
            f"no command called /{word}",
            hint=f"{hint} Begin a message that starts with a slash with two slashes.",
        )
    command.run(chat, argument.strip())
