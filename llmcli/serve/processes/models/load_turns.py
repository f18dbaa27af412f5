"""Which model is loaded next: the turns of models, shared between the clients whose requests wait.

One model at a time has the turn to be loaded. The next turn goes to the model of the client that
has waited longest since its own last turn, so that between the arrival of a request and its turn
each other client has at most one. Time is counted in turns.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from llmcli.serve.processes.models.admitted_process import AdmittedProcess


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits for its model.

    - `n_turns`: the turns that were given before it arrived; `number`: of all tickets.
    - `process`: done when the request may be sent to it.
    """

    client: str
    n_turns: int
    number: int
    process: "asyncio.Future[AdmittedProcess]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WaitingModel(Protocol):
    """A model for which requests wait."""

    @property
    def tickets(self) -> list[Ticket]:
        """The requests, the first to arrive first."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it is loaded and takes requests, so that it needs no turn."""
        ...


class LoadTurns:
    """The turns of the models of one event loop."""

    def __init__(self) -> None:
        self._n_turns = self._n_tickets = 0
        self._last_turns: dict[str, int] = {}  # by client, as long as requests of it wait
        self._holder: WaitingModel | None = None
        self._waiting: list[tuple[WaitingModel, asyncio.Future[None]]] = []

    def make_ticket(self, client: str) -> Ticket:
        """Return the ticket of a request that arrives now."""
        self._n_tickets += 1
        return Ticket(client, self._n_turns, self._n_tickets)

    def is_contended(self, model: WaitingModel) -> bool:
        """Return whether other clients than that of `model` wait for another model that must be
        loaded. A client alone need not be fair to itself.
        """
        models = {self._holder, *(other for other, _ in self._waiting)} - {None, model}
        waiting = (
            ticket.client
            for other in models
            if other and not other.is_ready
            for ticket in other.tickets
        )
        first = next(waiting, None)
        own = (ticket.client for ticket in model.tickets)
        return first is not None and any(client != first for client in chain(waiting, own))

    @asynccontextmanager
    async def turn(self, model: WaitingModel) -> AsyncIterator[None]:
        """Wait for the turn of a model, and have it for the block."""
        if self._holder is None:
            self._give(model)
        else:
            await self._wait(model)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, model: WaitingModel) -> None:
        """Wait until _pass_on() gives the turn to a model."""
        turn = asyncio.get_running_loop().create_future()
        entry = (model, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(entry)
            else:  # the turn was given just before
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next model, if one waits."""
        self._holder = None
        running = [entry for entry in self._waiting if not entry[1].cancelled()]
        if running:
            entry = min(running, key=lambda entry: self._rank(entry[0].tickets))
            self._waiting.remove(entry)
            self._give(entry[0])
            entry[1].set_result(None)

    def _give(self, model: WaitingModel) -> None:
        """Give the turn to a model, and count it for all clients that wait for the model. That of a
        model which is loaded meanwhile ends at once, and is not counted.
        """
        self._holder = model
        if model.is_ready:
            return
        self._n_turns += 1
        for ticket in model.tickets:
            self._last_turns[ticket.client] = self._n_turns
        clients = {ticket.client for other, _ in self._waiting for ticket in other.tickets}
        clients |= {ticket.client for ticket in model.tickets}
        self._last_turns = {
            client: turn for client, turn in self._last_turns.items() if client in clients
        }

    def _rank(self, tickets: Iterable[Ticket]) -> tuple[int, int, int]:
        """Return the rank of a model by its waiting requests; the smallest is next."""
        return (
            min(
                (max(last, ticket.n_turns), last, ticket.number)
                for ticket in tickets
                for last in (self._last_turns.get(ticket.client, 0),)
            )
            if tickets
            else (0, 0, 0)
        )  # all clients have left: its turn ends at once


def choose_tickets(tickets: Iterable[Ticket], running: Counter[str], count: int) -> list[Ticket]:
    """Return at most `count` of the waiting requests: those of the clients with the fewest running
    requests, and of one client the first to arrive. `running`: the number by client.
    """
    waiting = list(tickets)
    if count >= len(waiting):
        return waiting
    if count <= 0:
        return []
    by_client: dict[str, deque[Ticket]] = {}
    for ticket in sorted(waiting, key=lambda ticket: ticket.number):
        by_client.setdefault(ticket.client, deque()).append(ticket)
    # of each client the first request, so that a choice looks at no more than one of each
    heap = [(running[client], queue[0].number, client) for client, queue in by_client.items()]
    heapq.heapify(heap)
    chosen: list[Ticket] = []
    for _ in range(count):
        n_running, _number, client = heap[0]
        queue = by_client[client]
        chosen.append(queue.popleft())
        if queue:
            heapq.heapreplace(heap, (n_running + 1, queue[0].number, client))
        else:
            heapq.heappop(heap)
    return chosen
