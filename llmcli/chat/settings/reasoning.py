"""The setting `reasoning`: whether the chat template tells the model to think before it answers.
Some templates and servers do not support this.
"""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import ANSWER_GROUP, ChatSetting, Completion, parse_choice

REASONING_OF_WORD = {"auto": None, "on": True, "off": False}


def _show(chat: ChatSession) -> str:
    return next(
        word for word, meaning in REASONING_OF_WORD.items() if meaning is chat.model.reasoning
    )


def _change(chat: ChatSession, value: str) -> None:
    chat.model.set_reasoning(REASONING_OF_WORD[parse_choice("reasoning", REASONING_OF_WORD, value)])


def _values(chat: ChatSession) -> Iterable[str]:
    can_switch = chat.model.can_switch_reasoning
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
