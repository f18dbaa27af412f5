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
    talk: Talk, item: Item, typed: Callable[[Session], None] = lambda session: None
) -> None:
    """Load the conversation of `item`, with its KV state if possible.

    Then `typed` applies the options of the command line, which override the stored settings. Raises
    UserError if the conversation cannot be read; then nothing has changed.
    """
    stored = item.read()
    stored.put(talk.session)
    typed(talk.session)
    _try_form(talk)
    talk.unanswered, talk.saved_as = stored.unanswered, item.name if item.kind == "saved" else ""
    if stored.damaged:
        lines = several(stored.damaged, "damaged line")
        talk.ui.warn(f"skipped {lines} of {item.path}")
    if stored.model and stored.model != talk.name:
        talk.ui.warn(f"that chat used {stored.model}; {talk.name} continues it")
    state_note = kv_states.take_up(talk, item.state)
    turns = several(len(talk.session.tree.path()), "turn")
    talk.ui.text(f"loaded {item.name}: {', '.join(filter(None, (turns, state_note)))}")
    if stored.unanswered:
        talk.ui.note(
            f"{shortened(stored.unanswered, SHOWN)!r} was not answered: /retry asks it again"
        )


def _try_form(talk: Talk) -> None:
    """Remove the constraint on answers if this model cannot follow it."""
    if constraint := talk.session.constraint:
        try:
            talk.runner.grammars(constraint)
        except UserError as error:
            talk.session.constraint = None
            talk.ui.warn(f"the answer format of that chat is not used: {error}")


def go_on(talk: Talk, item: Item, typed: Callable[[Session], None]) -> None:
    """Continue the conversation of `item`.

    A session continues in its own log, unless another chat is writing that log.
    """
    take_up(talk, item, typed)
    if item.kind == "sitting":
        log = Log(talk.config, talk.ui.warn, item.path)
        if log.resume(talk.session):
            talk.log = log
            return
        talk.ui.note("another chat is using that session: this one is logged as a new session")
    talk.log.moved(talk.session, talk.name)
