"""/help prints the commands and their help texts. /exit ends the chat."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import GROUPS, ReplCommand
from llmcli.errors import UserError


def show_help(chat: ChatSession, argument: str) -> None:
    """List the commands, or explain one."""
    from llmcli.chat.commands import commands, commands_by_word

    word = argument.removeprefix("/").lower()
    if word:
        if word not in commands_by_word():
            raise UserError(f"no command called /{word}", hint="/help lists the commands")
        _print_help(chat, commands_by_word()[word])
        return
    for group in GROUPS:
        members = [command for command in commands().values() if command.group == group]
        if members:
            chat.ui.table(
                (group, ""), [(" ".join(_usages(command)), command.help) for command in members]
            )
    chat.ui.prose(
        'Several lines: """ before and after them, or Alt-Enter. '
        "Tab completes, Ctrl-C stops, Ctrl-D exits."
    )
    chat.ui.prose(
        "Begin a message that starts with a slash with two slashes. "
        "/help COMMAND explains a command."
    )


def _print_help(chat: ChatSession, command: ReplCommand) -> None:
    """Print the spellings and the complete help text of one command."""
    chat.ui.text(" or ".join(_usages(command)))
    chat.ui.prose(command.help)
    for paragraph in filter(None, command.details.split("\n\n")):
        chat.ui.prose("\n" + " ".join(paragraph.split()))


def _usages(command: ReplCommand) -> list[str]:
    """Return the command's name with its arguments, followed by its aliases, all with a slash."""
    return [f"/{command.name} {command.args}".rstrip(), *(f"/{alias}" for alias in command.aliases)]


def exit_chat(chat: ChatSession, argument: str) -> None:
    """Leave the chat."""
    chat.should_exit = True


def _command_names(chat: ChatSession) -> list[str]:
    from llmcli.chat.commands import commands

    return list(commands())


COMMANDS = (
    ReplCommand("help", show_help, "[COMMAND]", ("?",), _command_names, group="this program"),
    ReplCommand("exit", exit_chat, aliases=("bye", "quit"), group="this program"),
)
