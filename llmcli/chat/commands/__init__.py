"""The commands of the REPL, such as /save. Each module of this folder exports a tuple COMMANDS."""

import functools
from difflib import get_close_matches

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError
from quant.registry import collect


@functools.cache
def commands() -> dict[str, ReplCommand]:
    """Return all commands by name, without the slash."""
    return collect("llmcli.chat.commands", "COMMANDS")


@functools.cache
def commands_by_word() -> dict[str, ReplCommand]:
    """Return all commands by name and also by each alias. A command occurs once per spelling."""
    table: dict[str, ReplCommand] = {}
    for command in commands().values():
        for word in command.spellings:
            assert word not in table, f"/{word} is two commands"
            table[word] = command
    return table


def run_command(chat: ChatSession, line: str) -> None:
    """Run the command in `line`, which starts with a slash. Raises UserError if there is no such
    command, with a hint at a similar one, or if the command fails.
    """
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
