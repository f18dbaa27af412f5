"""The waiting requests and the order in which they are admitted.

Requests of one client are ordered by priority, which rises by one every PASSES_PER_PRIORITY passes
so that none starves; then preempted requests first, then by arrival. Clients are ordered by the
priority of their next request, which rises with the passes since one of their requests was last
admitted; then preempted first, then the client with the fewest running requests, then by arrival.
Counting from the last admission keeps a client that queued many old requests from blocking the
first request of another.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from llmcli.runtime.requests.sequence import Sequence

PASSES_PER_PRIORITY = 64  # passes per step of priority


class WaitingQueue:
    """The requests that do not run."""

    def __init__(self) -> None:
        self._all: list[Sequence] = []
        self._served: dict[
            str, int
        ] = {}  # waiting clients and the pass in which a request of theirs was last admitted

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._all))

    @property
    def n_preempted(self) -> int:
        """Return the number of requests that were preempted."""
        return sum(sequence.preemption.count > 0 for sequence in self._all)

    def add(self, sequence: Sequence, current_pass: int) -> None:
        """Add a sequence that waits from pass `current_pass` on."""
        sequence.preemption.waiting_since = current_pass
        self._all.append(sequence)

    def remove(self, sequence: Sequence, current_pass: int) -> None:
        """Remove a sequence that now runs or has ended."""
        self._all.remove(sequence)
        client = sequence.request.client
        if any(waiting.request.client == client for waiting in self._all):
            self._served[client] = current_pass
        else:
            self._served.pop(client, None)

    def in_order(self, current_pass: int, running: Iterable[Sequence]) -> list[Sequence]:
        """Return all waiting sequences in the order of admission."""
        clients: defaultdict[str, deque[Sequence]] = defaultdict(deque)
        for sequence in sorted(
            self._all,
            key=lambda sequence: (
                -_level(sequence, current_pass - sequence.preemption.waiting_since),
                not sequence.preemption.count,
                sequence.id,
            ),
        ):
            clients[sequence.request.client].append(sequence)
        if len(clients) == 1:
            return list(clients.popitem()[1])
        busy = Counter(sequence.request.client for sequence in running)

        def rank(client: str) -> tuple[int, bool, int, int, str]:
            sequence = clients[client][0]
            since = max(
                sequence.preemption.waiting_since,
                self._served.get(client, sequence.preemption.waiting_since),
            )
            return (
                -_level(sequence, current_pass - since),
                not sequence.preemption.count,
                busy[client],
                sequence.id,
                client,
            )

        heads = [rank(client) for client in clients]
        heapq.heapify(heads)
        ordered = []
        while heads:
            client = heads[0][-1]
            ordered.append(clients[client].popleft())
            busy[client] += 1  # as if it ran
            if clients[client]:
                heapq.heapreplace(heads, rank(client))
            else:
                heapq.heappop(heads)
        return ordered


def _level(sequence: Sequence, passes: int) -> int:
    return sequence.request.priority + passes // PASSES_PER_PRIORITY
