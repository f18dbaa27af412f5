"""Who waits, and who of them goes first.

Of one client's requests the largest priority, which rises by one with every AGE passes that a
request waits, so that none waits for ever; of equals who had begun and was put away, then who came
first. Between clients the priority of what each would have next, which rises with every AGE passes
since the client was last let in; of equals who was put away, then who has fewest running, then who
came first.

2026-11-22: the age of requests counted between clients, too. Whoever had sent 64 had 64 old ones,
and the first of somebody else waited for all that were left, 60; now for the 4 that run (answers of
200 tokens, 4 at once).
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from llmcli.runtime.sequence import Sequence

AGE = 64  # passes


class Waiting:
    """The requests that do not run."""

    def __init__(self) -> None:
        self._all: list[Sequence] = []
        self._served: dict[
            str, int
        ] = {}  # clients who wait -> the pass in which one of theirs was last let in

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._all))

    @property
    def preempted(self) -> int:
        """How many had begun."""
        return sum(one.preempted > 0 for one in self._all)

    def add(self, sequence: Sequence, now: int) -> None:
        """It waits from pass `now` on."""
        sequence.since = now
        self._all.append(sequence)

    def remove(self, sequence: Sequence, now: int) -> None:
        """It runs, or is over."""
        self._all.remove(sequence)
        client = sequence.request.client
        if any(one.request.client == client for one in self._all):
            self._served[client] = now
        else:
            self._served.pop(client, None)

    def ranked(self, now: int, running: Iterable[Sequence]) -> list[Sequence]:
        """All of them, who goes first standing first."""
        clients: defaultdict[str, deque[Sequence]] = defaultdict(deque)
        for one in sorted(
            self._all, key=lambda one: (-_level(one, now - one.since), not one.preempted, one.id)
        ):
            clients[one.request.client].append(one)
        if len(clients) == 1:
            return list(clients.popitem()[1])
        busy = Counter(one.request.client for one in running)

        def rank(client: str) -> tuple[int, bool, int, int, str]:
            one = clients[client][0]
            since = max(one.since, self._served.get(client, one.since))
            return -_level(one, now - since), not one.preempted, busy[client], one.id, client

        heads = [rank(client) for client in clients]
        heapq.heapify(heads)
        found = []
        while heads:
            client = heads[0][-1]
            found.append(clients[client].popleft())
            busy[client] += 1  # as if it ran
            if clients[client]:
                heapq.heapreplace(heads, rank(client))
            else:
                heapq.heappop(heads)
        return found


def _level(one: Sequence, passes: int) -> int:
    return one.request.priority + passes // AGE
