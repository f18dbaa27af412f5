"""The setting of what happens when the context is full."""

from collections.abc import Iterable

from llmcli.chat import context_overflow
from llmcli.chat.chat_session import Talk
from llmcli.chat.conversation import conversation
from llmcli.chat.settings.base import ANSWER, Knob, Offer, one_of


def _show(talk: Talk) -> str:
    return talk.session.on_full


def _change(talk: Talk, value: str) -> None:
    mode = one_of("on_full", conversation.MODES, value)
    if mode == "sinks":
        context_overflow.refuse_sinks(talk.runner)
    talk.session.on_full = mode


def _values(talk: Talk) -> Iterable[str]:
    return [Offer(mode, about) for mode, about in conversation.MODES.items()]


KNOBS = (
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
