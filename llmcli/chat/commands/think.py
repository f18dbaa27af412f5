"""/think: prints the thinking of the last answer, and sets whether the model thinks and how its
thinking is displayed.
"""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.commands.set import change_and_print
from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW
from llmcli.chat.settings import find_setting
from llmcli.errors import UserError

DISPLAY_WORDS, REASONING_WORDS = (SHOW, FOLD, HIDE), ("on", "off", "auto")


def show_or_set_thinking(chat: ChatSession, argument: str) -> None:
    """Show the thinking of the last answer; with a word, change a setting.

    `show` displays thinking dimmed, `fold` displays one line instead, and `hide` displays nothing.
    `on` and `off` tell the model whether to think, if its template supports this. With `auto` the
    template decides.
    """
    word = argument.lower()
    if word in DISPLAY_WORDS:
        change_and_print(chat, find_setting("thinking"), word)
    elif word in REASONING_WORDS:
        change_and_print(chat, find_setting("reasoning"), word)
    elif argument:
        raise UserError(
            f"/think {argument}: no such choice",
            hint=f"use one of {', '.join((*DISPLAY_WORDS, *REASONING_WORDS))}",
        )
    else:
        if not chat.last_text.thinking:
            raise UserError(
                "the last answer contains no thinking",
                hint="/think on asks models to think that can",
            )
        chat.ui.text(chat.last_text.thinking.strip())


COMMANDS = (
    ReplCommand(
        "think",
        show_or_set_thinking,
        "[show|fold|hide|on|off]",
        first_completions=lambda chat: (*DISPLAY_WORDS, *REASONING_WORDS),
        group="model and settings",
    ),
)
