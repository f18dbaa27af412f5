"""/help and /exit."""

from llmcli.chat.commands.base import Command
from llmcli.chat.talk import Talk
from llmcli.errors import UserError


def show_help(talk: Talk, rest: str) -> None:
    """List the commands, or tell about one."""
    from llmcli.chat.commands import commands, words

    wanted = rest.removeprefix("/").lower()
    if wanted and wanted not in words():
        raise UserError(f"no command called /{wanted}", hint="/help lists the commands")
    chosen = [words()[wanted]] if wanted else list(commands().values())
    talk.ui.table(
        ("command", "also", "what it does"),
        [(f"/{c.name} {c.args}".rstrip(), " ".join(f"/{a}" for a in c.aliases), c.help) for c in chosen],
    )
    if not wanted:
        talk.ui.text('Several lines: """ begins and ends them, or Alt-Enter. Ctrl-C stops an answer, Ctrl-D leaves.')
        talk.ui.text("Two slashes send a text that starts with one.")


def leave(talk: Talk, rest: str) -> None:
    """Leave the chat."""
    talk.leaving = True


def _words(talk: Talk) -> list[str]:
    from llmcli.chat.commands import commands

    return list(commands())


COMMANDS = (
    Command("help", show_help, "[COMMAND]", ("?",), _words),
    Command("exit", leave, aliases=("bye", "quit")),
)
