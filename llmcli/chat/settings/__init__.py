"""What `/set` changes: each module of this folder exports KNOBS."""

import functools
from difflib import get_close_matches

from llmcli.chat.settings.base import Knob
from llmcli.errors import UserError
from quant.registry import collect


@functools.cache
def knobs() -> dict[str, Knob]:
    """Every knob by name: what an answer is drawn with first, what the screen shows of it last."""
    table: dict[str, Knob] = collect("llmcli.chat.settings", "KNOBS")
    return dict(
        sorted(table.items(), key=lambda item: item[1].order)
    )  # stable: a module's own order stays


def find(name: str) -> Knob:
    """The knob of that name or alias; raises UserError naming the nearest."""
    wanted = name.strip().lower().replace("-", "_")
    for knob in knobs().values():
        if wanted == knob.name or wanted in knob.aliases:
            return knob
    near = get_close_matches(wanted, knobs(), 1)
    known = ", ".join(knobs())
    raise UserError(
        f"no setting called {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"there are: {known}",
    )
