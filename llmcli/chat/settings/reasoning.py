"""The settings `reasoning` and `reasoning_budget`: whether the chat template tells the model to
think before it answers, which some templates and servers do not support, and how long an answer may
think.
"""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import ANSWER_GROUP, ChatSetting, Completion, parse_choice
from llmcli.errors import UserError

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


def _show_budget(chat: ChatSession) -> str:
    return str(-1 if chat.reasoning_budget is None else chat.reasoning_budget)


def _change_budget(chat: ChatSession, value: str) -> None:
    try:
        number = int(value)
    except ValueError:
        number = -2
    if number < -1:
        raise UserError(
            f"{value!r} is not a number of thinking tokens",
            hint="reasoning_budget takes a whole number, 0 for no thinking, or -1 for no limit",
        )
    if number >= 0 and chat.conversation.search.beams > 1:
        raise UserError(
            "a beam search has no budget of thinking tokens", hint="use /set beams 1 first"
        )
    chat.reasoning_budget = None if number == -1 else number


def _budget_values(chat: ChatSession) -> Iterable[str]:
    return [
        Completion("-1", "no limit"),
        Completion("0", "no thinking"),
        Completion("512", "tokens"),
        Completion("2048", "tokens"),
    ]


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
    ChatSetting(
        "reasoning_budget",
        ANSWER_GROUP,
        "the maximum number of thinking tokens in an answer, -1 = no limit",
        "-1 or more",
        "-1",
        _show_budget,
        _change_budget,
        _budget_values,
        ("budget", "thinking_budget"),
    ),
)
