"""brief: answers of at most 40 tokens."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import ANSWER, SWITCH, Knob, one_of

TOKENS = 40


def show_brief(talk: Talk) -> str:
    """Return the value in effect."""
    return "on" if talk.session.predict == TOKENS else "off"


def change_brief(talk: Talk, value: str) -> None:
    """Set the limit; raises UserError for another word."""
    talk.session.predict = TOKENS if SWITCH[one_of("brief", SWITCH, value)] else None


def list_values(talk: Talk) -> Iterable[str]:
    """Return the values that Tab offers."""
    return SWITCH


SETTINGS = (
    Knob(
        "brief",
        ANSWER,
        "answer with at most 40 tokens",
        ", ".join(SWITCH),
        "off",
        show_brief,
        change_brief,
        list_values,
    ),
)
