"""A model of a server of several: its state, the requests that wait for it, and its failures."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmcli.api.errors import ApiError
from llmcli.model_loader.planned_memory import PlannedMemory
from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.runtime.drafting.gain.pass_cost import MeasuredPasses
from llmcli.serve.processes.models.admitted_process import AdmittedProcess
from llmcli.serve.processes.models.load_turns import Ticket, choose_tickets
from llmcli.serve.processes.models.served_models import FileStamp, ServedModel
from llmcli.serve.serve_request import ServeRequest

ModelState = Literal["here", "absent", "queued", "loading", "loaded", "unloading", "failed"]
# delays before a model is loaded again, by the number of failures in a row
RETRY_DELAYS_SECONDS = (0.0, 1.0, 5.0, 15.0, 60.0)
MAX_RETRY_WAIT_SECONDS = 5.0  # requests wait for a delay up to this, and are refused otherwise
# While other clients wait for other models, a process has at most this many requests at a time for
# each of its parallel answers, so that it is soon idle when it must make room.
ROUNDS_OF_A_TURN = 4


class LoadAbandoned(Exception):
    """All clients that waited for a model have disconnected."""


@dataclass(slots=True, eq=False)
class PooledModel:
    """A model of the pool.

    - `is_offered`: requests can name it; not so after it was removed.
    - `reserved`: the bytes that count for its process now, by device.
    - `memory`: what it takes, once it was planned for `planned_request` in the state `stamp` of its
      file with the limits `plan_limits` by device. `passes`: what a load has measured since.
    - `running`: requests that its process answers, by client; `tickets`: requests that wait for it.
    - `drains_for`: why it gets no further requests; "" if it does.
    - `expires_at`: when it is unloaded if it is idle.
    - `n_failures`: crashes and failed loads in a row; `error`: the last one, with which requests
      are refused until `retry_at`.
    """

    served: ServedModel
    is_offered: bool = True
    state: ModelState = "here"
    reserved: Mapping[str, int] = field(default_factory=dict)
    memory: PlannedMemory | None = None
    stamp: FileStamp | None = None
    planned_request: ServeRequest | None = None
    plan_limits: Mapping[str, int] = field(default_factory=dict)
    passes: MeasuredPasses | None = None
    process: AdmittedProcess | None = None
    running: Counter[str] = field(default_factory=Counter)
    tickets: list[Ticket] = field(default_factory=list)
    drains_for: str = ""
    last_used: float = 0.0
    expires_at: float = math.inf
    n_failures: int = 0
    error: str = ""
    error_hint: str = ""
    retry_at: float = 0.0
    n_loads: int = 0
    n_crashes: int = 0
    load_seconds: float = 0.0
    load_task: "asyncio.Task[None] | None" = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # its process has ended

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.served.name

    @property
    def reserved_bytes(self) -> int:
        """The bytes that count for its process on the host."""
        return self.reserved.get(HOST_DEVICE, 0)

    @property
    def device_bytes(self) -> dict[str, int]:
        """The bytes that count for its process on each GPU."""
        return {name: size for name, size in self.reserved.items() if name != HOST_DEVICE}

    @property
    def n_running(self) -> int:
        """The number of requests that its process answers."""
        return self.running.total()

    @property
    def n_waiting(self) -> int:
        """The number of requests that wait for it."""
        return len(self.tickets)

    @property
    def is_wanted(self) -> bool:
        """Whether there is a reason to load it."""
        return bool(self.tickets) or self.served.is_pinned

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now."""
        return self.state == "loaded" and not self.drains_for

    @property
    def shown_state(self) -> ModelState:
        """The state for people and clients."""
        if self.state == "here" and self.served.path is None:
            return "absent"
        return "failed" if self.state == "here" and self.error else self.state

    def grant(self, is_contended: bool) -> None:
        """Give the process to the requests that wait for it. They count at once, so that the model
        is not unloaded before they run. `is_contended`: other clients wait for other models, so
        that only as many get it as a turn has.
        """
        assert self.process is not None
        count = len(self.tickets)
        if is_contended:
            count = ROUNDS_OF_A_TURN * self.served.request.parallel - self.n_running
        chosen = choose_tickets(self.tickets, self.running, count)
        numbers = {ticket.number for ticket in chosen}
        self.tickets = [ticket for ticket in self.tickets if ticket.number not in numbers]
        for ticket in chosen:
            self.running[ticket.client] += 1
            ticket.process.set_result(self.process)
        self.last_used = time.monotonic()

    def release(self, client: str, keep_alive: float) -> None:
        """Count a request of a client as ended. `keep_alive`: seconds for which the model stays
        loaded if it is idle.
        """
        self.running[client] -= 1
        self.running += Counter()  # drops clients without requests
        self.last_used = time.monotonic()
        self.expires_at = self.last_used + keep_alive

    def record_failure(self, message: str, hint: str, *, is_crash: bool = False) -> None:
        """Keep an error, and when the model is tried again: after a first crash at once."""
        self.n_failures += 1
        delays = RETRY_DELAYS_SECONDS
        index = self.n_failures - (1 if is_crash else 0)
        self.retry_at = time.monotonic() + delays[min(index, len(delays) - 1)]
        self.error, self.error_hint = message, hint

    def raise_failure(self) -> None:
        """Raise ApiError if the model has failed, and is not tried again soon."""
        seconds = self.retry_at - time.monotonic()
        if self.error and seconds > MAX_RETRY_WAIT_SECONDS:
            raise ApiError(
                f"{self.name} is not available: {self.error}; it is tried again in"
                f" {math.ceil(seconds)} s",
                503,
                code="model_unavailable",
                hint=self.error_hint,
            )
