"""`DraftCounts`: what the drafts of one method brought in an answer, by the depth of the guesses."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The checked drafts of one method. Entry 0 of each tuple is about the first guesses of drafts.
    A draft that is a tree counts once at each depth, with all its guesses for the token there.

    - `guesses`: the number of drafts with a guess. `checked`: how many of them the model has drawn a
      token for, because all guesses before were right. `right`: how many of these had it.
    - `seconds`: the time for making the drafts, with checkpoints before them and without reading the
      text.

    A guess is not checked either if the answer ended before it.
    """

    method: str
    guesses: tuple[int, ...] = ()
    checked: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def n_drafts(self) -> int:
        """Return the number of drafts."""
        return self.guesses[0] if self.guesses else 0

    @property
    def n_guesses(self) -> int:
        """Return the number of guesses in all drafts."""
        return sum(self.guesses)

    @property
    def n_right(self) -> int:
        """Return the number of right guesses in all drafts."""
        return sum(self.right)

    @property
    def acceptance(self) -> list[float | None]:
        """Return for each depth the share of the checked guesses that were right; None where no
        guess was checked.
        """
        return [
            right / checked if checked else None
            for right, checked in zip(self.right, self.checked, strict=True)
        ]

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        """Return the sum of two counts of the same method."""
        assert self.method == other.method, (self.method, other.method)
        return DraftCounts(
            self.method,
            _add(self.guesses, other.guesses),
            _add(self.checked, other.checked),
            _add(self.right, other.right),
            self.seconds + other.seconds,
        )


def _add(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(first, second, fillvalue=0)))


def sum_counts(method: str, counts: Iterable[DraftCounts]) -> DraftCounts:
    """Return the sum of those counts that belong to `method`."""
    return sum((one for one in counts if one.method == method), DraftCounts(method))


class DraftTally:
    """Counts the drafts of one method while an answer is generated."""

    def __init__(self, method: str) -> None:
        self.method, self.seconds = method, 0.0
        self.guesses: list[int] = []
        self.checked: list[int] = []
        self.right: list[int] = []

    def record(self, n_guesses: int, n_checked: int, n_right: int, seconds: float) -> None:
        """Record a draft of `n_guesses` depths that took `seconds`. The model has checked the first
        `n_checked` of them, and the first `n_right` had the right guess.
        """
        for numbers, count in (
            (self.guesses, n_guesses),
            (self.checked, n_checked),
            (self.right, n_right),
        ):
            numbers += [0] * (n_guesses - len(numbers))
            for depth in range(count):
                numbers[depth] += 1
        self.seconds += seconds

    def counts(self) -> DraftCounts:
        """Return what was recorded so far."""
        return DraftCounts(
            self.method, tuple(self.guesses), tuple(self.checked), tuple(self.right), self.seconds
        )
