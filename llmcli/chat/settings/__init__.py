"""The settings that `/set` changes; each module of this folder exports SETTINGS."""

import functools
from difflib import get_close_matches

from llmcli.chat.settings.base import Knob
from llmcli.errors import UserError
from quant.registry import collect


@functools.cache
def knobs() -> dict[str, Knob]:
    """Return every setting by name, in the order of `/set`'s list."""
    table: dict[str, Knob] = collect("llmcli.chat.settings", "SETTINGS")
    # A stable sort: the settings of one module keep their order.
    return dict(sorted(table.items(), key=lambda item: item[1].order))


def find(name: str) -> Knob:
    """Return the setting with this name or alias. Raises UserError that suggests a similar name."""
    wanted = name.strip().lower().replace("-", "_")
    for setting in knobs().values():
        if wanted == setting.name or wanted in setting.aliases:
            return setting
    near = get_close_matches(wanted, knobs(), 1)
    names = ", ".join(knobs())
    raise UserError(
        f"no setting called {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"the settings are: {names}",
    )
