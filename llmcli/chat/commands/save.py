"""/clear, /save and /load: clear, store and load the conversation."""

import time
from collections.abc import Iterable

from llmcli.chat import kv_states, resume
from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.conversation import history, saved_chats
from llmcli.errors import UserError
from llmcli.units import size


def clear(talk: Talk, rest: str) -> None:
    """Clear the conversation; the system text and the settings stay."""
    talk.session.clear()
    talk.unanswered = None
    talk.runner.engine.ledger.evict_idle()
    talk.ui.text("the conversation is cleared")


def save(talk: Talk, rest: str) -> None:
    """Save the conversation under a name, with all its branches and its KV state."""
    name = rest or talk.saved_as or time.strftime("%Y%m%dT%H%M%S")
    path, replaced = saved_chats.save(talk.session, talk.config, name, talk.name)
    talk.saved_as = name
    state = path.with_suffix(".kv")
    try:
        state_note = kv_states.keep(talk, state)
    except UserError as error:  # the conversation itself is saved
        state_note = f"without its KV state: {error}"
    nbytes = sum(file.stat().st_size for file in (path, state) if file.exists())
    remark = ", replacing the chat of that name" if replaced else ""
    talk.ui.text(
        f"saved as {name} ({path}){remark}: {', '.join(filter(None, (size(nbytes), state_note)))}"
    )


def load(talk: Talk, rest: str) -> None:
    """Load a saved chat or an earlier session; without a name, list the saved chats.

    `/load last` loads the newest session; `llmcli sessions` in the shell lists all sessions.
    """
    if rest:
        resume.take_up(talk, history.find(talk.config, rest))
        return
    names = saved_chats.names(talk.config)
    talk.ui.text("saved chats: " + ", ".join(names) if names else "there are no saved chats")


def _saved(talk: Talk) -> Iterable[str]:
    return saved_chats.names(talk.config)


COMMANDS = (
    Command("clear", clear),
    Command("save", save, "[NAME]", completions=_saved),
    Command("load", load, "[NAME]", completions=_saved),
)
