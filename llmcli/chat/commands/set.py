"""/set: lists and changes the settings of the chat."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.commands.system import (
    changeable_settings,
    print_all_settings,
    print_settings,
    set_system,
)
from llmcli.chat.settings import find_setting
from llmcli.chat.settings.base import ChatSetting, Completion
from llmcli.errors import UserError

# Settings that cannot be changed while the model is loaded, and their command-line flags.
FLAG_OF_FIXED_NAME = {
    "ctx_size": "--ctx-size",
    "num_ctx": "--ctx-size",
    "threads": "--threads",
    "num_thread": "--threads",
    "gpu_layers": "--gpu-layers",
    "num_gpu": "--gpu-layers",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "flash_attn": "-fa",
    "batch_size": "--batch-size",
    "ubatch_size": "--ubatch-size",
    "gemm": "--gemm",
}
# Words of ollama's /set that take no value, and the setting and value that they stand for.
SETTING_OF_WORD = {
    "verbose": ("timing", "line"),
    "quiet": ("timing", "off"),
    "think": ("reasoning", "on"),
    "nothink": ("reasoning", "off"),
}


def change_setting(chat: ChatSession, argument: str) -> None:
    """Change a setting; without an argument, list all settings.

    `/set parameter NAME VALUE`, `/set system TEXT`, `/set verbose`, `quiet`, `think` and `nothink`
    mean what they mean in ollama. `/set NAME` shows one setting.
    """
    words = argument.split(None, 1)
    if words and words[0] == "parameter":
        words = words[1].split(None, 1) if len(words) > 1 else []
    if not words:
        print_all_settings(chat)
        return
    name, value = words[0], words[1].strip() if len(words) > 1 else None
    key = name.lower().replace("-", "_")
    if key in SETTING_OF_WORD and value is None:
        key, value = SETTING_OF_WORD[key]
    if key == "system":
        set_system(chat, value or "")
        return
    if key in FLAG_OF_FIXED_NAME:
        chat.model.require_runner()
        raise UserError(
            f"{name} cannot be changed while the model is loaded",
            hint=f"leave, and start with {FLAG_OF_FIXED_NAME[key]}",
        )
    setting = find_setting(key)
    if obstacle := chat.model.setting_obstacle(setting.name):
        raise UserError(f"{name} cannot be changed here: {obstacle}", hint="/set lists what can")
    if value is None:
        print_settings(chat, [setting])
    else:
        change_and_print(chat, setting, value)


def change_and_print(chat: ChatSession, setting: ChatSetting, value: str) -> None:
    """Set a setting to the typed `value` and print its new value. Raises UserError if the value is
    invalid.
    """
    setting.set_value(chat, value)
    chat.ui.text(f"{setting.name} = {setting.format_value(chat)}")


def _complete_names(chat: ChatSession) -> Iterable[str]:
    """Yield the words that can follow /set: settings with their values, then ollama's words."""
    for setting in changeable_settings(chat):
        yield Completion(
            setting.name, f"{setting.format_value(chat)} · {setting.range} · {setting.help}"
        )
    yield Completion("system", "the system text")
    for word, (name, value) in SETTING_OF_WORD.items():
        yield Completion(word, f"{name} {value}")


def _complete_values(chat: ChatSession, words: list[str]) -> Iterable[str]:
    """Return what Tab offers after the arguments `words`: after the name of a setting its values,
    and after the word `parameter` the names of all settings.
    """
    if words[0] == "parameter":
        words = words[1:]
    if not words:
        return _complete_names(chat)
    key = words[0].lower().replace("-", "_")
    setting = next(
        (
            setting
            for setting in changeable_settings(chat)
            if key in (setting.name, *setting.aliases)
        ),
        None,
    )
    return setting.offered_values(chat) if setting and len(words) == 1 else ()


COMMANDS = (
    ReplCommand(
        "set",
        change_setting,
        "[NAME [VALUE]]",
        first_completions=_complete_names,
        later_completions=_complete_values,
        group="model and settings",
    ),
)
