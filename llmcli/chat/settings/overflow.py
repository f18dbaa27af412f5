"""The setting `on_full`: what happens when the context is full."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation import conversation
from llmcli.chat.settings.base import ANSWER_GROUP, ChatSetting, Completion, parse_choice
from llmcli.runtime.sinks_support import require_sinks_support


def _show(chat: ChatSession) -> str:
    return chat.conversation.on_full


def _change(chat: ChatSession, value: str) -> None:
    mode = parse_choice("on_full", conversation.ON_FULL_MODES, value)
    if mode == "sinks":
        require_sinks_support(chat.runner)
    chat.conversation.on_full = mode


def _values(chat: ChatSession) -> Iterable[str]:
    return [Completion(mode, about) for mode, about in conversation.ON_FULL_MODES.items()]


SETTINGS = (
    ChatSetting(
        "on_full",
        ANSWER_GROUP,
        "what happens when the context is full",
        ", ".join(conversation.ON_FULL_MODES),
        "stop",
        _show,
        _change,
        _values,
    ),
)
