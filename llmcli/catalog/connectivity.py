"""Checks whether the hub and pip's package index can be reached (`llmcli doctor --network`)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from llmcli.catalog.hub.ping import ping_hub
from llmcli.catalog.sources import wheel
from llmcli.config import Config
from llmcli.errors import UserError


@dataclass(frozen=True, slots=True)
class ConnectivityCheck:
    """The result of a request to one host. `name`: what the host is. `ms`: milliseconds until it
    answered or failed. `problem`: why it failed, "" if it answered.
    """

    name: str
    host: str
    ms: float
    problem: str


def check_connectivity(config: Config) -> list[ConnectivityCheck]:
    """Send a small request to the hub and another to pip's package index, and return both results.
    Raises UserError if --offline is set.
    """
    if config.offline:
        raise UserError(
            "--network makes connections, and --offline forbids them",
            hint="leave out one of them (HF_HUB_OFFLINE and LLMCLI_OFFLINE mean --offline, too)",
        )
    checks = []
    targets: tuple[tuple[str, str, Callable[[], str]], ...] = (
        ("the hub", urlsplit(config.hub_endpoint).netloc, partial(ping_hub, config)),
        ("pip's package index", "as pip is configured", wheel.ping_index),
    )
    for name, host, ping in targets:
        start = time.perf_counter()
        problem = ping()
        checks.append(ConnectivityCheck(name, host, (time.perf_counter() - start) * 1e3, problem))
    return checks
