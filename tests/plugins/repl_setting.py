"""The REPL setting `brief`: answers have at most 40 tokens."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import ANSWER_GROUP, SWITCH_WORDS, ChatSetting, parse_choice

TOKENS = 40


def show_brief(session: ChatSession) -> str:
    """Return the current value, "on" or "off"."""
    return "on" if session.conversation.predict == TOKENS else "off"


def change_brief(session: ChatSession, value: str) -> None:
    """Set the limit of tokens. Raises UserError if `value` is neither "on" nor "off"."""
    session.conversation.predict = (
        TOKENS if SWITCH_WORDS[parse_choice("brief", SWITCH_WORDS, value)] else None
    )


def list_values(session: ChatSession) -> Iterable[str]:
    """Return the values that Tab completes."""
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
