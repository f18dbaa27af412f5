"""The waiting requests, and the order in which they are admitted.

Requests of one client are ordered by priority. Among equals, preempted requests come first, then
those that arrived earlier. The priority of a waiting request rises by one every PASSES_PER_PRIORITY
passes, so that every request runs at some time.

To choose between clients, the first request of each is compared: by priority, then the client with
the fewest running answers comes first, then preempted requests, then the earlier arrival. The
samples of a request and the beams of a search count as so many answers. For this comparison the
priority rises only with the passes since the client's last admitted request. So a client with many
old requests cannot block the first request of another client.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from llmcli.runtime.requests.sequence import Sequence

PASSES_PER_PRIORITY = 64  # passes of waiting that raise the priority by one
# passes that a client without running answers waits for a client with several
FAIR_PASSES = 64


class WaitingQueue:
    """The requests that wait to be admitted, including preempted ones."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        # for each client with waiting requests, the pass in which a request of it last left the
        # queue
        self._last_served: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    @property
    def n_preempted(self) -> int:
        """Return the number of waiting requests that were preempted."""
        return sum(sequence.preemption.count > 0 for sequence in self._sequences)

    @property
    def has_foreground(self) -> bool:
        """Return whether a request waits for which background requests must give way. One whose
        beginning is being read from the disk needs no slot yet.
        """
        return any(
            not (
                sequence.request.is_background
                or sequence.waits_for_prefix
                or sequence.disk_read.is_loading
            )
            for sequence in self._sequences
        )

    def add(self, sequence: Sequence, current_pass: int) -> None:
        """Add a sequence, which waits from pass number `current_pass` on."""
        sequence.preemption.waiting_since = current_pass
        self._sequences.append(sequence)

    def remove(self, sequence: Sequence, current_pass: int) -> None:
        """Remove a sequence that was admitted or has ended. `current_pass`: the number of the
        present pass.
        """
        self._sequences.remove(sequence)
        client = sequence.request.client
        if any(waiting.request.client == client for waiting in self._sequences):
            self._last_served[client] = current_pass
        else:
            self._last_served.pop(client, None)

    def late_sequences(self, current_pass: int, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the foreground requests of clients without running answers that have waited for
        more than FAIR_PASSES passes, since they arrived or since the client's last request began.
        """
        clients = {sequence.request.client for sequence in running}
        return [
            sequence
            for sequence in self._sequences
            if sequence.request.client not in clients
            and not (sequence.request.is_background or sequence.waits_for_prefix)
            and current_pass - self._waiting_since(sequence) > FAIR_PASSES
        ]

    def _waiting_since(self, sequence: Sequence) -> int:
        """Return the pass from which on a request waits in the comparison of clients."""
        since = sequence.preemption.waiting_since
        return max(since, self._last_served.get(sequence.request.client, since))

    def in_order(self, current_pass: int, running: Iterable[Sequence]) -> list[Sequence]:
        """Return all waiting sequences in the order in which they should be admitted. `running`:
        the running sequences, which are counted by client.
        """
        clients: defaultdict[str, deque[Sequence]] = defaultdict(deque)
        for sequence in sorted(
            self._sequences,
            key=lambda sequence: (
                -_raised_priority(sequence, current_pass - sequence.preemption.waiting_since),
                not sequence.preemption.count,
                sequence.id,
            ),
        ):
            clients[sequence.request.client].append(sequence)
        if len(clients) == 1:
            return list(clients.popitem()[1])
        n_running = count_running(running)

        def rank(client: str) -> tuple[int, int, bool, int, str]:
            """Return the sort key of a client's first waiting request."""
            sequence = clients[client][0]
            return (
                -_raised_priority(sequence, current_pass - self._waiting_since(sequence)),
                n_running[client],
                not sequence.preemption.count,
                sequence.id,
                client,
            )

        ranks = [rank(client) for client in clients]
        heapq.heapify(ranks)
        ordered = []
        while ranks:
            client = ranks[0][-1]
            ordered.append(clients[client].popleft())
            n_running[client] += ordered[-1].strategy.slots  # count the request as running
            if clients[client]:
                heapq.heapreplace(ranks, rank(client))
            else:
                heapq.heappop(ranks)
        return ordered


def count_running(running: Iterable[Sequence]) -> Counter[str]:
    """Return for each client the number of its running answers, with each beam of a search."""
    counts: Counter[str] = Counter()
    for sequence in running:
        counts[sequence.request.client] += sequence.strategy.slots
    return counts


def _raised_priority(sequence: Sequence, passes: int) -> int:
    """Return the priority of a sequence after it has waited for `passes` passes."""
    return sequence.request.priority + passes // PASSES_PER_PRIORITY
