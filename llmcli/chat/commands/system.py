"""/system: sets and shows the system text. Also prints tables of settings for /set and /show."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.settings import chat_settings
from llmcli.chat.settings.base import SAMPLING_GROUP, ChatSetting


def set_system(chat: ChatSession, argument: str) -> None:
    """Set the system text; without an argument, show it (`/system ""` removes it)."""
    if not argument:
        print_system(chat)
        return
    text = argument[1:-1] if len(argument) > 1 and argument[0] == argument[-1] == '"' else argument
    chat.conversation.system = text or None
    chat.ui.text("system text set" if text else "system text removed")


def print_system(chat: ChatSession) -> None:
    """Print the system text, or a note that none is set."""
    chat.ui.text(
        chat.conversation.system or "no system text is set; the model's template may contain one"
    )


def print_all_settings(chat: ChatSession) -> None:
    """Print a table of all settings of the chat."""
    print_settings(chat, changeable_settings(chat))


def changeable_settings(chat: ChatSession) -> list[ChatSetting]:
    """Return the settings that can be changed with the model of the chat."""
    return [
        setting
        for setting in chat_settings().values()
        if not chat.model.setting_obstacle(setting.name)
    ]


def print_settings(chat: ChatSession, settings: Iterable[ChatSetting]) -> None:
    """Print a table with the value, default, range and meaning of each of the settings."""
    rows = [
        (
            setting.name,
            setting.format_value(chat),
            # the defaults of sampling are those of a server if it has the model
            "" if chat.model.server and setting.group == SAMPLING_GROUP else setting.default,
            setting.range,
            setting.help,
        )
        for setting in settings
    ]
    chat.ui.table(
        ("setting", "value", "default", "range", "meaning"), rows, right=("value", "default")
    )


COMMANDS = (ReplCommand("system", set_system, "[TEXT]", group="model and settings"),)
