"""/system, and the tables of settings."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.settings import knobs
from llmcli.chat.settings.base import Knob


def set_system(chat: Talk, rest: str) -> None:
    """Set the system text; without an argument, show it (`/system ""` removes it)."""
    if not rest:
        chat.ui.text(
            chat.session.system or "no system text is set; the model's template may contain one"
        )
        return
    text = rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] == '"' else rest
    chat.session.system = text or None
    chat.ui.text("system text set" if text else "system text removed")


def list_settings(chat: Talk) -> None:
    """Print a table of all settings."""
    listing(chat, knobs().values())


def listing(chat: Talk, wanted: Iterable[Knob]) -> None:
    """Print a table of settings: value, default, range and meaning."""
    rows = [
        (setting.name, setting.show(chat), setting.default, setting.range, setting.help)
        for setting in wanted
    ]
    chat.ui.table(
        ("setting", "value", "default", "range", "meaning"), rows, right=("value", "default")
    )


COMMANDS = (Command("system", set_system, "[TEXT]", group="model and settings"),)
