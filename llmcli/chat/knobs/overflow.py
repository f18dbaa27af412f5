"""What happens when the context is full."""

from collections.abc import Iterable

from llmcli.chat import overflow
from llmcli.chat.knobs.base import ANSWER, Knob, Offer, one_of
from llmcli.chat.talk import Talk


def _show(talk: Talk) -> str:
    return talk.session.on_full


def _change(talk: Talk, value: str) -> None:
    mode = one_of("on_full", overflow.MODES, value)
    if mode == "sinks":
        overflow.refuse_sinks(talk.runner)
    talk.session.on_full = mode


def _values(talk: Talk) -> Iterable[str]:
    return [Offer(mode, about) for mode, about in overflow.MODES.items()]


KNOBS = (
    Knob(
        "on_full",
        ANSWER,
        "what happens when the context is full",
        ", ".join(overflow.MODES),
        "stop",
        _show,
        _change,
        _values,
    ),
)
