"""/clear, /save and /load: the conversation itself."""

import time
from collections.abc import Iterable

from llmcli.chat import kv_states, resume
from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.conversation import history, saved_chats
from llmcli.errors import UserError
from llmcli.units import size


def clear(talk: Talk, rest: str) -> None:
    """Forget the conversation; system text and settings stay."""
    talk.session.clear()
    talk.unanswered = None
    talk.runner.engine.ledger.forget_idle()
    talk.ui.text("the conversation is empty")


def save(talk: Talk, rest: str) -> None:
    """Write the conversation to disk under a name: all its branches, and its KV state."""
    name = rest or talk.saved_as or time.strftime("%Y%m%dT%H%M%S")
    path, replaced = saved_chats.save(talk.session, talk.config, name, talk.name)
    talk.saved_as = name
    state = path.with_suffix(".kv")
    try:
        told = kv_states.keep(talk, state)
    except UserError as error:  # what was said is on the disk
        told = f"without its KV state: {error}"
    nbytes = sum(file.stat().st_size for file in (path, state) if file.exists())
    instead = ", in place of the chat of that name" if replaced else ""
    talk.ui.text(
        f"saved as {name} ({path}){instead}: {', '.join(filter(None, (size(nbytes), told)))}"
    )


def load(talk: Talk, rest: str) -> None:
    """Go on with a saved conversation or a sitting before; alone, list them.

    `/load last` is the newest sitting; the shell's `llmcli sessions` lists all of them.
    """
    if rest:
        resume.take_up(talk, history.find(talk.config, rest))
        return
    names = saved_chats.names(talk.config)
    talk.ui.text("saved chats: " + ", ".join(names) if names else "no chat is saved yet")


def _saved(talk: Talk) -> Iterable[str]:
    return saved_chats.names(talk.config)


COMMANDS = (
    Command("clear", clear),
    Command("save", save, "[NAME]", completions=_saved),
    Command("load", load, "[NAME]", completions=_saved),
)
