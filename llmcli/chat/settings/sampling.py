"""The sampling settings, such as temp and top_k. They are made from the registry of sampler steps
(runtime/sampling), so that a new step needs no code here.
"""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import SAMPLING_GROUP, ChatSetting, Completion
from llmcli.runtime.sampling import SamplingSetting, sampling_settings
from llmcli.runtime.sampling.base import NumberLimits

MAX_SHOWN_LIMIT = 1000  # Tab does not offer limits beyond this as values
SERVER_VALUE = "the server's"  # shown in place of a value that is not sent to the server


def _chat_setting(setting: SamplingSetting) -> ChatSetting:
    """Return the chat setting for a setting of a sampler step."""

    def show(chat: ChatSession) -> str:
        if chat.model.has_own_value(chat, setting.name):
            return SERVER_VALUE
        return setting.format_value(chat.conversation.sampling[setting.name])

    def change(chat: ChatSession, value: str) -> None:
        chat.conversation.sampling = chat.conversation.sampling.with_values({setting.name: value})
        chat.conversation.typed_settings.add(setting.name)

    def values(chat: ChatSession) -> Iterable[str]:
        default, limits = setting.format_value(setting.default), setting.limits
        if not isinstance(limits, NumberLimits):
            return [Completion(default, f"default · {limits}")]
        descriptions = {show(chat): "current", default: "default"}
        bounds = ((limits.low, "minimum"), (limits.high, "maximum"))
        for bound, description in bounds[limits.open_low :]:
            if abs(bound) <= MAX_SHOWN_LIMIT:
                descriptions.setdefault(setting.format_value(bound), description)
        return [
            Completion(value, f"{description} · {limits}")
            for value, description in descriptions.items()
        ]

    return ChatSetting(
        setting.name,
        SAMPLING_GROUP,
        setting.help,
        f"{setting.limits}",
        setting.format_value(setting.default),
        show,
        change,
        values,
        setting.aliases,
    )


SETTINGS = tuple(_chat_setting(setting) for setting in sampling_settings().values())
