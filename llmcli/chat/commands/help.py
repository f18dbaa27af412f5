"""/help and /exit."""

import shutil
import textwrap

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import GROUPS, Command
from llmcli.errors import UserError

WIDE = 100  # columns; longer lines are hard to read


def show_help(chat: Talk, rest: str) -> None:
    """List the commands, or explain one."""
    from llmcli.chat.commands import commands, words

    word = rest.removeprefix("/").lower()
    if word:
        if word not in words():
            raise UserError(f"no command called /{word}", hint="/help lists the commands")
        _tell(chat, words()[word])
        return
    for group in GROUPS:
        members = [command for command in commands().values() if command.group == group]
        if members:
            chat.ui.table(
                (group, ""), [(" ".join(_spelled(command)), command.help) for command in members]
            )
    chat.ui.text(
        'Several lines: """ before and after them, or Alt-Enter. '
        "Tab completes, Ctrl-C stops, Ctrl-D leaves."
    )
    chat.ui.text(
        "Begin a message that starts with a slash with two slashes. "
        "/help COMMAND explains a command."
    )


def _tell(chat: Talk, command: Command) -> None:
    chat.ui.text(" or ".join(_spelled(command)))
    chat.ui.text(command.help)
    width = min(shutil.get_terminal_size().columns, WIDE)
    for paragraph in filter(None, command.details.split("\n\n")):
        chat.ui.text(f"\n{textwrap.fill(paragraph, width, break_on_hyphens=False)}")


def _spelled(command: Command) -> list[str]:
    """Return a command with its arguments, then its other spellings."""
    return [f"/{command.name} {command.args}".rstrip(), *(f"/{alias}" for alias in command.aliases)]


def leave(chat: Talk, rest: str) -> None:
    """Leave the chat."""
    chat.leaving = True


def _words(chat: Talk) -> list[str]:
    from llmcli.chat.commands import commands

    return list(commands())


COMMANDS = (
    Command("help", show_help, "[COMMAND]", ("?",), _words, group="this program"),
    Command("exit", leave, aliases=("bye", "quit"), group="this program"),
)
