"""Loads a stored conversation into a chat session (`/load`), or resumes an earlier session
(`chat --resume`).
"""

from collections.abc import Callable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.history import HistoryItem
from llmcli.chat.conversation.session_log import SessionLog
from llmcli.chat.display.tree_drawing import QUOTED_CHARS, shorten
from llmcli.errors import UserError
from llmcli.units import format_count


def load_conversation(
    chat: ChatSession,
    item: HistoryItem,
    apply_options: Callable[[Conversation], None] = lambda conversation: None,
) -> None:
    """Replace the session's conversation by the stored conversation `item`, with its KV state if
    possible, and print what was loaded.

    `apply_options`: function that sets the settings of command-line options, which override the
    stored settings. Raises UserError if the conversation cannot be read. The session is then
    unchanged.
    """
    stored = item.read_conversation()
    try:
        stored.restore_into(chat.conversation)
    except UserError as error:
        raise UserError(f"{item.path}: {error}", hint=error.hint) from None
    apply_options(chat.conversation)
    _check_constraint(chat)
    chat.pending_message, chat.saved_name = (
        stored.pending_message,
        item.name if item.kind == "saved" else "",
    )
    if stored.n_damaged:
        lines = format_count(stored.n_damaged, "damaged line")
        chat.ui.warn(f"skipped {lines} of {item.path}")
    if stored.model and stored.model != chat.name:
        chat.ui.warn(f"that chat used {stored.model}; {chat.name} continues it")
    state_note = chat.model.restore_state(chat, item.state_path)
    turns = format_count(len(chat.conversation.tree.current_path()), "turn")
    chat.ui.text(f"loaded {item.name}: {', '.join(filter(None, (turns, state_note)))}")
    if stored.pending_message:
        chat.ui.note(
            f"{shorten(stored.pending_message, QUOTED_CHARS)!r} was not answered: /retry asks it again"
        )


def _check_constraint(chat: ChatSession) -> None:
    """Remove the loaded grammar or schema, with a warning, if it cannot be used with this model."""
    if constraint := chat.conversation.constraint:
        try:
            chat.model.check_constraint(constraint)
        except UserError as error:
            chat.conversation.constraint = None
            chat.ui.warn(f"the answer format of that chat is not used: {error}")


def resume_conversation(
    chat: ChatSession, item: HistoryItem, apply_options: Callable[[Conversation], None]
) -> None:
    """Load the stored conversation `item` and continue it. If it is a session log, new turns are
    appended to that log, unless another running chat is writing to it.

    For `apply_options` and the errors see load_conversation.
    """
    load_conversation(chat, item, apply_options)
    if item.kind == "sitting":
        log = SessionLog(chat.config, chat.ui.warn, item.path)
        if log.resume(chat.conversation):
            chat.log = log
            return
        chat.ui.note("another chat is using that session: this one is logged as a new session")
    chat.record_position()
