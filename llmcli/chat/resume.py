"""Loads a stored conversation into a session, or continues its session."""

from collections.abc import Callable

from llmcli.chat import kv_states
from llmcli.chat.chat_session import Talk
from llmcli.chat.conversation.conversation import Session
from llmcli.chat.conversation.history import Item
from llmcli.chat.conversation.session_log import Log
from llmcli.chat.display.tree_drawing import shortened
from llmcli.errors import UserError
from llmcli.units import several

SHOWN = 40  # characters of a question shown in a message


def take_up(
    chat: Talk, item: Item, typed: Callable[[Session], None] = lambda conversation: None
) -> None:
    """Load the conversation of `item`, with its KV state if possible.

    Then `typed` applies the options of the command line, which override the stored settings. Raises
    UserError if the conversation cannot be read; then nothing has changed.
    """
    stored = item.read()
    stored.put(chat.session)
    typed(chat.session)
    _try_form(chat)
    chat.unanswered, chat.saved_as = stored.unanswered, item.name if item.kind == "saved" else ""
    if stored.damaged:
        lines = several(stored.damaged, "damaged line")
        chat.ui.warn(f"skipped {lines} of {item.path}")
    if stored.model and stored.model != chat.name:
        chat.ui.warn(f"that chat used {stored.model}; {chat.name} continues it")
    state_note = kv_states.take_up(chat, item.state)
    turns = several(len(chat.session.tree.path()), "turn")
    chat.ui.text(f"loaded {item.name}: {', '.join(filter(None, (turns, state_note)))}")
    if stored.unanswered:
        chat.ui.note(
            f"{shortened(stored.unanswered, SHOWN)!r} was not answered: /retry asks it again"
        )


def _try_form(chat: Talk) -> None:
    """Remove the constraint on answers if this model cannot follow it."""
    if constraint := chat.session.constraint:
        try:
            chat.runner.grammars(constraint)
        except UserError as error:
            chat.session.constraint = None
            chat.ui.warn(f"the answer format of that chat is not used: {error}")


def go_on(chat: Talk, item: Item, typed: Callable[[Session], None]) -> None:
    """Continue the conversation of `item`.

    A session continues in its own log, unless another chat is writing that log.
    """
    take_up(chat, item, typed)
    if item.kind == "sitting":
        log = Log(chat.config, chat.ui.warn, item.path)
        if log.resume(chat.session):
            chat.log = log
            return
        chat.ui.note("another chat is using that session: this one is logged as a new session")
    chat.log.moved(chat.session, chat.name)
