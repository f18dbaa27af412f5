"""/clear removes the conversation, /save writes it to disk, and /load reads a stored one."""

import time
from collections.abc import Iterable

from llmcli.chat import resume
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.conversation import history, saved_chats
from llmcli.errors import UserError
from llmcli.units import format_size


def clear_conversation(chat: ChatSession, argument: str) -> None:
    """Clear the conversation; the system text and the settings stay."""
    chat.conversation.clear()
    chat.pending_message = None
    chat.model.forget_conversation()
    chat.ui.text("the conversation is cleared")


def save_conversation(chat: ChatSession, argument: str) -> None:
    """Save the conversation under a name, with all its branches and its KV state."""
    name = argument or chat.saved_name or time.strftime("%Y%m%dT%H%M%S")
    path, replaced = saved_chats.save_chat(
        chat.conversation, chat.config, name, chat.name, chat.model.server
    )
    chat.saved_name = name
    state = path.with_suffix(".kv")
    try:
        state_note = chat.model.save_state(chat, state)
    except UserError as error:  # the conversation itself is saved
        state_note = f"without its KV state: {error}"
    nbytes = sum(file.stat().st_size for file in (path, state) if file.exists())
    remark = ", replacing the chat of that name" if replaced else ""
    chat.ui.text(
        f"saved as {name} ({path}){remark}: {', '.join(filter(None, (format_size(nbytes), state_note)))}"
    )


def load_stored(chat: ChatSession, argument: str) -> None:
    """Load a saved chat or an earlier session; without a name, list the saved chats.

    `/load last` loads the newest session; `llmcli sessions` in the shell lists all sessions.
    """
    if argument:
        resume.load_conversation(chat, history.find_item(chat.config, argument))
        return
    names = saved_chats.list_names(chat.config)
    chat.ui.text("saved chats: " + ", ".join(names) if names else "there are no saved chats")


def _saved_names(chat: ChatSession) -> Iterable[str]:
    return saved_chats.list_names(chat.config)


COMMANDS = (
    ReplCommand("clear", clear_conversation),
    ReplCommand("save", save_conversation, "[NAME]", first_completions=_saved_names),
    ReplCommand("load", load_stored, "[NAME]", first_completions=_saved_names),
)
