"""/set: list and change settings."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.commands.system import list_settings, listing, set_system
from llmcli.chat.settings import find, knobs
from llmcli.chat.settings.base import Knob, Offer
from llmcli.errors import UserError

FIXED = {
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
# ollama's words without a value
WORDS = {
    "verbose": ("timing", "line"),
    "quiet": ("timing", "off"),
    "think": ("reasoning", "on"),
    "nothink": ("reasoning", "off"),
}


def change(chat: Talk, rest: str) -> None:
    """Change a setting; without an argument, list all settings.

    `/set parameter NAME VALUE`, `/set system TEXT`, `/set verbose`, `quiet`, `think` and `nothink`
    mean what they mean in ollama.
    """
    words = rest.split(None, 1)
    if words and words[0] == "parameter":
        words = words[1].split(None, 1) if len(words) > 1 else []
    if not words:
        list_settings(chat)
        return
    name, value = words[0], words[1].strip() if len(words) > 1 else None
    key = name.lower().replace("-", "_")
    if key in WORDS and value is None:
        key, value = WORDS[key]
    if key == "system":
        set_system(chat, value or "")
    elif key in FIXED:
        raise UserError(
            f"{name} cannot be changed while the model is loaded",
            hint=f"leave, and start with {FIXED[key]}",
        )
    elif value is None:
        listing(chat, [find(key)])
    else:
        turn(chat, find(key), value)


def turn(chat: Talk, setting: Knob, value: str) -> None:
    """Change one setting and print its new value."""
    setting.change(chat, value)
    chat.ui.text(f"{setting.name} = {setting.show(chat)}")


def _names(chat: Talk) -> Iterable[str]:
    for setting in knobs().values():
        yield Offer(setting.name, f"{setting.show(chat)} · {setting.range} · {setting.help}")
    yield Offer("system", "the system text")
    for word, (name, value) in WORDS.items():
        yield Offer(word, f"{name} {value}")


def _values(chat: Talk, words: list[str]) -> Iterable[str]:
    """Return the values of the typed name; after `parameter`, the names."""
    if words[0] == "parameter":
        words = words[1:]
    if not words:
        return _names(chat)
    key = words[0].lower().replace("-", "_")
    setting = next(
        (setting for setting in knobs().values() if key in (setting.name, *setting.aliases)), None
    )
    return setting.values(chat) if setting and len(words) == 1 else ()


COMMANDS = (
    Command(
        "set",
        change,
        "[NAME [VALUE]]",
        completions=_names,
        further=_values,
        group="model and settings",
    ),
)
