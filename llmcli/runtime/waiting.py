"""Who waits, and who of them goes first.

The larger priority, which rises by one with every AGE passes that a request waits, so that nobody waits for ever; of
equals who had begun and was put away; then whose client has fewest running; then who came first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from llmcli.runtime.sequence import Sequence

AGE = 64  # passes


class Waiting:
    """The requests that do not run."""

    def __init__(self) -> None:
        self._all: list[Sequence] = []

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

    def remove(self, sequence: Sequence) -> None:
        """It runs, or is over."""
        self._all.remove(sequence)

    def ranked(self, now: int, running: Iterable[Sequence]) -> list[Sequence]:
        """All of them, who goes first standing first."""
        clients = Counter(one.request.client for one in running)

        def rank(one: Sequence) -> tuple[int, bool, int, int]:
            level = one.request.priority + (now - one.since) // AGE
            return -level, not one.preempted, clients[one.request.client], one.id

        return sorted(self._all, key=rank)
