"""The setting `reasoning`: whether the chat template tells the model to think before it answers.
Some templates do not support this.
"""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import ANSWER_GROUP, ChatSetting, Completion, parse_choice
from llmcli.errors import UserError

REASONING_OF_WORD = {"auto": None, "on": True, "off": False}


def _show(chat: ChatSession) -> str:
    reasoning = chat.runner.template.reasoning if chat.runner.template else None
    return next(word for word, meaning in REASONING_OF_WORD.items() if meaning is reasoning)


def _change(chat: ChatSession, value: str) -> None:
    reasoning, template = (
        REASONING_OF_WORD[parse_choice("reasoning", REASONING_OF_WORD, value)],
        chat.runner.template,
    )
    if reasoning is not None and not (template and template.thinking_variables):
        raise UserError(
            "this model's template cannot turn thinking on or off",
            hint="/set thinking hide (--hidethinking) hides any thinking",
        )
    if template:
        template.reasoning = reasoning


def _values(chat: ChatSession) -> Iterable[str]:
    can_switch = bool(chat.runner.template and chat.runner.template.thinking_variables)
    return [Completion("auto", "the template's default"), *(("on", "off") if can_switch else ())]


SETTINGS = (
    ChatSetting(
        "reasoning",
        ANSWER_GROUP,
        "whether the model is asked to think first",
        ", ".join(REASONING_OF_WORD),
        "auto",
        _show,
        _change,
        _values,
        ("think",),
    ),
)
