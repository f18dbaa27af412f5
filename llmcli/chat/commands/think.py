"""/think: show the model's thinking, and choose how it is shown and whether to think."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.commands.set import turn
from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW
from llmcli.chat.settings import find
from llmcli.errors import UserError
from llmcli.runtime.text.reasoning import split_thinking

ON_SCREEN, ASKED = (SHOW, FOLD, HIDE), ("on", "off", "auto")


def think(chat: Talk, rest: str) -> None:
    """Show the thinking of the last answer; with a word, change a setting.

    `show` dims thinking, `fold` shows one line instead, `hide` leaves it out. `on` and `off` ask
    the model to think or not to, if its template supports that; `auto` leaves it to the template.
    """
    word = rest.lower()
    if word in ON_SCREEN:
        turn(chat, find("thinking"), word)
    elif word in ASKED:
        turn(chat, find("reasoning"), word)
    elif rest:
        raise UserError(
            f"/think {rest}: no such choice", hint=f"use one of {', '.join((*ON_SCREEN, *ASKED))}"
        )
    else:
        thought, _ = split_thinking(chat.whole(chat.last.text)) if chat.last else ("", "")
        if not thought:
            raise UserError(
                "the last answer contains no thinking",
                hint="/think on asks models to think that can",
            )
        chat.ui.text(thought.strip())


COMMANDS = (
    Command(
        "think",
        think,
        "[show|fold|hide|on|off]",
        completions=lambda chat: (*ON_SCREEN, *ASKED),
        group="model and settings",
    ),
)
