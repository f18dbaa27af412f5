"""brief: answers of at most 40 tokens."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import ANSWER_GROUP, SWITCH_WORDS, ChatSetting, parse_choice

TOKENS = 40


def show_brief(talk: ChatSession) -> str:
    """Return the value in effect."""
    return "on" if talk.conversation.predict == TOKENS else "off"


def change_brief(talk: ChatSession, value: str) -> None:
    """Set the limit; raises UserError for another word."""
    talk.conversation.predict = TOKENS if SWITCH_WORDS[parse_choice("brief", SWITCH_WORDS, value)] else None


def list_values(talk: ChatSession) -> Iterable[str]:
    """Return the values that Tab offers."""
    return SWITCH_WORDS


SETTINGS = (
    ChatSetting(
        "brief",
        ANSWER_GROUP,
        "answer with at most 40 tokens",
        ", ".join(SWITCH_WORDS),
        "off",
        show_brief,
        change_brief,
        list_values,
    ),
)
