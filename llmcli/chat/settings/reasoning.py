"""The setting of whether the model is asked to think, for templates that support it."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import ANSWER, Knob, Offer, one_of
from llmcli.errors import UserError

MEANT = {"auto": None, "on": True, "off": False}


def _show(chat: Talk) -> str:
    reasoning = chat.runner.template.reasoning if chat.runner.template else None
    return next(word for word, meaning in MEANT.items() if meaning is reasoning)


def _change(chat: Talk, value: str) -> None:
    reasoning, template = MEANT[one_of("reasoning", MEANT, value)], chat.runner.template
    if reasoning is not None and not (template and template.thinking_variables):
        raise UserError(
            "this model's template cannot turn thinking on or off",
            hint="/set thinking hide (--hidethinking) hides any thinking",
        )
    if template:
        template.reasoning = reasoning


def _values(chat: Talk) -> Iterable[str]:
    can_switch = bool(chat.runner.template and chat.runner.template.thinking_variables)
    return [Offer("auto", "the template's default"), *(("on", "off") if can_switch else ())]


SETTINGS = (
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
