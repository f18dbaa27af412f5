"""Whether the model is asked to think, where its template can say so."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import ANSWER, Knob, Offer, one_of
from llmcli.errors import UserError

MEANT = {"auto": None, "on": True, "off": False}


def _show(talk: Talk) -> str:
    asked = talk.runner.template.reasoning if talk.runner.template else None
    return next(word for word, meant in MEANT.items() if meant is asked)


def _change(talk: Talk, value: str) -> None:
    asked, template = MEANT[one_of("reasoning", MEANT, value)], talk.runner.template
    if asked is not None and not (template and template.switches):
        raise UserError(
            "this model's template has no switch for thinking",
            hint="/set thinking hide (--hidethinking) leaves out what it thinks, if it does",
        )
    if template:
        template.reasoning = asked


def _values(talk: Talk) -> Iterable[str]:
    able = bool(talk.runner.template and talk.runner.template.switches)
    return [Offer("auto", "as the template has it"), *(("on", "off") if able else ())]


KNOBS = (
    Knob(
        "reasoning",
        ANSWER,
        "whether the model is asked to think first",
        ", ".join(MEANT),
        "auto",
        _show,
        _change,
        _values,
        ("think",),
    ),
)
