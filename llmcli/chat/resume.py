"""A conversation from the disk goes on: in a sitting that has begun, or as the same sitting."""

from collections.abc import Callable

from llmcli.chat import kv_states
from llmcli.chat.chat_session import Talk
from llmcli.chat.conversation.conversation import Session
from llmcli.chat.conversation.history import Item
from llmcli.chat.conversation.session_log import Log
from llmcli.chat.display.tree_drawing import shortened
from llmcli.errors import UserError

SHOWN = 40  # characters of a question that a line tells


def take_up(
    talk: Talk, item: Item, typed: Callable[[Session], None] = lambda session: None
) -> None:
    """Put the talk where `item` was, with its KV state where that can be used; what was `typed`
    wins over then.

    Raises UserError where it cannot be read; then nothing has changed.
    """
    held = item.read()
    held.put(talk.session)
    typed(talk.session)
    _try_form(talk)
    talk.unanswered, talk.saved_as = held.unanswered, item.name if item.kind == "saved" else ""
    if held.damaged:
        talk.ui.warn(
            f"{held.damaged} damaged line{'s' * (held.damaged != 1)} of {item.path} are left out"
        )
    if held.model and held.model != talk.name:
        talk.ui.warn(f"that chat was held with {held.model}; {talk.name} goes on with it")
    count = len(talk.session.tree.path())
    told = kv_states.take_up(talk, item.state)
    talk.ui.text(
        f"loaded {item.name}: {', '.join(filter(None, (f'{count} turn' + 's' * (count != 1), told)))}"
    )
    if held.unanswered:
        talk.ui.note(
            f"{shortened(held.unanswered, SHOWN)!r} was not answered: /retry asks it again"
        )


def _try_form(talk: Talk) -> None:
    """Leave out the form of answers where this model cannot follow it."""
    if asked := talk.session.constraint:
        try:
            talk.runner.grammars(asked)
        except UserError as error:
            talk.session.constraint = None
            talk.ui.warn(f"the format of that chat's answers is left out: {error}")


def go_on(talk: Talk, item: Item, typed: Callable[[Session], None]) -> None:
    """Begin a talk as the one that `item` was: a sitting goes on in its own log, unless another
    chat writes it.
    """
    take_up(talk, item, typed)
    if item.kind == "sitting":
        log = Log(talk.config, talk.ui.warn, item.path)
        if log.resume(talk.session):
            talk.log = log
            return
        talk.ui.note("another chat goes on with that sitting: this one is kept as a new one")
    talk.log.moved(talk.session, talk.name)
