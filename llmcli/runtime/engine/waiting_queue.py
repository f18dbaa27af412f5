"""The waiting requests and the order in which they are admitted.

The requests of one client are ordered by priority; among equals preempted requests come first, then
those that arrived earlier. The priority of a waiting request rises by one every PASSES_PER_PRIORITY
passes, so that every request runs at some time.

Between clients, the next request of each is compared: first by priority, then preempted requests
come first, then the client with the fewest running requests, then the earlier arrival. For this
comparison the priority rises only with the passes since the client's last admitted request. So a
client with many old requests cannot block the first request of another client.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from llmcli.runtime.requests.sequence import Sequence

PASSES_PER_PRIORITY = 64  # passes of waiting that raise the priority by one


class WaitingQueue:
    """The requests that do not run."""

    def __init__(self) -> None:
        self._all: list[Sequence] = []
        self._served: dict[
            str, int
        ] = {}  # for each waiting client, the pass in which a request of it last left the queue

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._all))

    @property
    def n_preempted(self) -> int:
        """Return the number of waiting requests that were preempted."""
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
            busy[client] += 1  # count the request as running
            if clients[client]:
                heapq.heapreplace(heads, rank(client))
            else:
                heapq.heappop(heads)
        return ordered


def _level(sequence: Sequence, passes: int) -> int:
    return sequence.request.priority + passes // PASSES_PER_PRIORITY
