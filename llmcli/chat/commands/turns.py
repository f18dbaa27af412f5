"""/clear, /save and /load: the conversation itself."""

import time
from collections.abc import Iterable

from llmcli.chat import saved, states
from llmcli.chat.commands.base import Command
from llmcli.chat.talk import Talk
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
    path, replaced = saved.save(talk.session, talk.config, name, talk.name)
    talk.saved_as = name
    state = saved.state_path(talk.config, name)
    try:
        told = states.keep(talk, state)
    except UserError as error:  # what was said is on the disk
        told = f"without its KV state: {error}"
    nbytes = sum(file.stat().st_size for file in (path, state) if file.exists())
    instead = ", in place of the chat of that name" if replaced else ""
    talk.ui.text(f"saved as {name} ({path}){instead}: {', '.join(filter(None, (size(nbytes), told)))}")


def load(talk: Talk, rest: str) -> None:
    """Go on with a saved conversation; alone, list them."""
    if not rest:
        names = saved.saved_names(talk.config)
        talk.ui.text("saved chats: " + ", ".join(names) if names else "no chat is saved yet")
        return
    model = saved.load(talk.session, talk.config, rest)
    talk.saved_as, talk.unanswered = rest, None
    if model != talk.name:
        talk.ui.warn(f"that chat was held with {model}; {talk.name} goes on with it")
    count = len(talk.session.tree.path())
    told = states.take_up(talk, saved.state_path(talk.config, rest))
    talk.ui.text(f"loaded {rest}: {', '.join(filter(None, (f'{count} turn' + 's' * (count != 1), told)))}")


def _saved(talk: Talk) -> Iterable[str]:
    return saved.saved_names(talk.config)


COMMANDS = (
    Command("clear", clear),
    Command("save", save, "[NAME]", completions=_saved),
    Command("load", load, "[NAME]", completions=_saved),
)
