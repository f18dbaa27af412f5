"""/clear, /save and /load: clear, store and load the conversation."""

import time
from collections.abc import Iterable

from llmcli.chat import kv_states, resume
from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.conversation import history, saved_chats
from llmcli.errors import UserError
from llmcli.units import size


def clear(chat: Talk, rest: str) -> None:
    """Clear the conversation; the system text and the settings stay."""
    chat.session.clear()
    chat.unanswered = None
    chat.runner.engine.ledger.evict_idle()
    chat.ui.text("the conversation is cleared")


def save(chat: Talk, rest: str) -> None:
    """Save the conversation under a name, with all its branches and its KV state."""
    name = rest or chat.saved_as or time.strftime("%Y%m%dT%H%M%S")
    path, replaced = saved_chats.save(chat.session, chat.config, name, chat.name)
    chat.saved_as = name
    state = path.with_suffix(".kv")
    try:
        state_note = kv_states.keep(chat, state)
    except UserError as error:  # the conversation itself is saved
        state_note = f"without its KV state: {error}"
    nbytes = sum(file.stat().st_size for file in (path, state) if file.exists())
    remark = ", replacing the chat of that name" if replaced else ""
    chat.ui.text(
        f"saved as {name} ({path}){remark}: {', '.join(filter(None, (size(nbytes), state_note)))}"
    )


def load(chat: Talk, rest: str) -> None:
    """Load a saved chat or an earlier session; without a name, list the saved chats.

    `/load last` loads the newest session; `llmcli sessions` in the shell lists all sessions.
    """
    if rest:
        resume.take_up(chat, history.find(chat.config, rest))
        return
    names = saved_chats.names(chat.config)
    chat.ui.text("saved chats: " + ", ".join(names) if names else "there are no saved chats")


def _saved(chat: Talk) -> Iterable[str]:
    return saved_chats.names(chat.config)


COMMANDS = (
    Command("clear", clear),
    Command("save", save, "[NAME]", completions=_saved),
    Command("load", load, "[NAME]", completions=_saved),
)
