"""Whether what models come from can be reached: asked only where somebody wants to know."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from llmcli.catalog.hub import answers
from llmcli.catalog.sources import wheel
from llmcli.config import Config
from llmcli.errors import UserError


@dataclass(frozen=True, slots=True)
class Reached:
    """One place: `problem` is empty where it answered, after `ms` milliseconds."""

    what: str
    where: str
    ms: float
    problem: str


def look(config: Config) -> list[Reached]:
    """Ask the hub and pip's package index one small question each; raises UserError when offline."""
    if config.offline:
        raise UserError(
            "--network asks the hub and the package index, and --offline makes no connection",
            hint="leave out one of them (HF_HUB_OFFLINE and LLMCLI_OFFLINE mean --offline, too)",
        )
    found = []
    places: tuple[tuple[str, str, Callable[[], str]], ...] = (
        ("the hub", urlsplit(config.hub_endpoint).netloc, partial(answers.answers, config)),
        ("pip's package index", "as pip is configured", wheel.answers),
    )
    for what, where, ask in places:
        began = time.perf_counter()
        problem = ask()
        found.append(Reached(what, where, (time.perf_counter() - began) * 1e3, problem))
    return found
