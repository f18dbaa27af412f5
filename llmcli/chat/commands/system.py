"""/system, and the tables of settings."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.settings import knobs
from llmcli.chat.settings.base import Knob


def set_system(talk: Talk, rest: str) -> None:
    """Set the system text; without an argument, show it (`/system ""` removes it)."""
    if not rest:
        talk.ui.text(
            talk.session.system or "no system text is set; the model's template may contain one"
        )
        return
    text = rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] == '"' else rest
    talk.session.system = text or None
    talk.ui.text("system text set" if text else "system text removed")


def list_settings(talk: Talk) -> None:
    """Print a table of all settings."""
    listing(talk, knobs().values())


def listing(talk: Talk, wanted: Iterable[Knob]) -> None:
    """Print a table of settings: value, default, range and meaning."""
    rows = [(knob.name, knob.show(talk), knob.default, knob.range, knob.help) for knob in wanted]
    talk.ui.table(
        ("setting", "value", "default", "range", "meaning"), rows, right=("value", "default")
    )


COMMANDS = (Command("system", set_system, "[TEXT]", group="model and settings"),)
