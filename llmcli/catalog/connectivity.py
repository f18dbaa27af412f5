"""Connectivity checks: whether the hub and the package index answer."""

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
    """The check of one host: it answered or failed after `ms` milliseconds; `problem` is "" if it
    answered.
    """

    name: str
    host: str
    ms: float
    problem: str


def check_connectivity(config: Config) -> list[ConnectivityCheck]:
    """Send a small request to the hub and to pip's package index.

    Raises UserError if offline.
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
