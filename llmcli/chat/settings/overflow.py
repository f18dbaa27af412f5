"""The setting of what happens when the context is full."""

from collections.abc import Iterable

from llmcli.chat import context_overflow
from llmcli.chat.chat_session import Talk
from llmcli.chat.conversation import conversation
from llmcli.chat.settings.base import ANSWER, Knob, Offer, one_of


def _show(chat: Talk) -> str:
    return chat.session.on_full


def _change(chat: Talk, value: str) -> None:
    mode = one_of("on_full", conversation.MODES, value)
    if mode == "sinks":
        context_overflow.refuse_sinks(chat.runner)
    chat.session.on_full = mode


def _values(chat: Talk) -> Iterable[str]:
    return [Offer(mode, about) for mode, about in conversation.MODES.items()]


SETTINGS = (
    Knob(
        "on_full",
        ANSWER,
        "what happens when the context is full",
        ", ".join(conversation.MODES),
        "stop",
        _show,
        _change,
        _values,
    ),
)
