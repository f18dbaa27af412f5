"""Which type each tensor gets so that a file has so many bytes and the loss is least.

A tensor's options are types with what they take and what they cost in divergence; losses of tensors
add up. Of the lower convex hull of every tensor's options the steps down are taken in the order of
what they gain a byte: those are the solutions of the Lagrangian for falling multipliers, each the
best there is at its own number of bytes. What is left of the budget then goes, largest gain first,
to whatever still fits, off the hulls too. It knows names and numbers, no weights and no models.

One tensor may be most of a model (an embedding of 262,144 words is 63 % of Gemma 3 270M), and a
step of it more than all others leave. So the largest are given each of their types in turn, and the
best of those mixes is taken: with steps alone Gemma's file at Q6_K's bytes kept the embedding in
Q5_1 and 44 MB unspent, 0.0077 nats for the 0.0035 of one type throughout (2026-11-23).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from quant.errors import Refusal

MOST_TYPES = 5  # in a file, where that costs little: every type has kernels of its own
LITTLE = 0.02  # of the loss, for a type less
LARGE, MOST_LARGE = (
    0.05,
    2,
)  # of all bytes that may be given, for a tensor's types to be tried in turn; so many of them
CLOSE = 0.003  # how far below a target a file may stay without being told


@dataclass(frozen=True, slots=True)
class Option:
    """A type for one tensor: the bytes it takes in the file, padding counted, and the divergence it
    costs.
    """

    type: str
    nbytes: int
    loss: float


Menu = Mapping[str, Sequence[Option]]


@dataclass(frozen=True, slots=True)
class _Step:
    """From one corner of a tensor's hull to its next `option`: bytes more, loss more (below zero),
    and loss a byte.
    """

    slope: float
    name: str
    option: Option
    nbytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `most` bytes for the whole file, of which `fixed` are not a tensor's of the menu."""

    most: int
    fixed: int = 0

    @property
    def left(self) -> int:
        """What the tensors may take."""
        return self.most - self.fixed


@dataclass(frozen=True, slots=True)
class Allocation:
    """Every tensor's option."""

    picks: Mapping[str, Option]

    @property
    def nbytes(self) -> int:
        return sum(pick.nbytes for pick in self.picks.values())

    @property
    def loss(self) -> float:
        return sum(pick.loss for pick in self.picks.values())

    @property
    def mix(self) -> dict[str, str]:
        """Name -> type."""
        return {name: pick.type for name, pick in self.picks.items()}

    @property
    def types(self) -> tuple[str, ...]:
        """The types in use, those with most bytes first."""
        held: dict[str, int] = {}
        for pick in self.picks.values():
            held[pick.type] = held.get(pick.type, 0) + pick.nbytes
        return tuple(sorted(held, key=lambda kind: (-held[kind], kind)))


def hull(options: Iterable[Option]) -> tuple[Option, ...]:
    """The lower convex hull: smallest first, every step down gains less a byte than the one before
    it.
    """
    points: list[Option] = []
    for option in sorted(options, key=lambda one: (one.nbytes, one.loss)):
        if points and option.loss >= points[-1].loss:
            continue
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-2], option):
            points.pop()
        points.append(option)
    return tuple(points)


def _slope(one: Option, other: Option) -> float:
    """Loss a byte; below zero."""
    return (other.loss - one.loss) / (other.nbytes - one.nbytes)


def reach(menu: Menu) -> tuple[int, int]:
    """The least and the most bytes that options worth their bytes take."""
    hulls = [hull(options) for options in menu.values()]
    return sum(points[0].nbytes for points in hulls), sum(points[-1].nbytes for points in hulls)


def in_reach(menu: Menu, budget: Budget) -> bool:
    """Whether some mix fits into the budget, and some is not much smaller."""
    least, most = reach(menu)
    return least <= budget.left and budget.most * (1 - CLOSE) <= most + budget.fixed


def refusal(menu: Menu, budget: Budget) -> Refusal:
    """What is said of a budget out of reach."""
    least, most = reach(menu)
    return Refusal(
        f"no mix of these types makes a file of {budget.most:,} bytes: "
        f"the smallest has {least + budget.fixed:,}, the largest {most + budget.fixed:,}",
        hint="choose a size between them, or other types with --types",
    )


def allocate(menu: Menu, budget: Budget) -> Allocation:
    """The best mix in the budget; raises Refusal, with what can be reached, where there is none or
    it is too large.
    """
    if not in_reach(menu, budget):
        raise refusal(menu, budget)
    hulls = {name: hull(options) for name, options in menu.items()}
    best = _stepped(menu, hulls, budget.left)
    for bound, picks in _ways(menu, hulls, budget.left):
        if bound >= best.loss:
            break
        held = {name: (pick,) for name, pick in picks.items()}
        best = min(
            best,
            _stepped({**menu, **held}, {**hulls, **held}, budget.left),
            key=lambda one: one.loss,
        )
    return best


def _ways(menu: Menu, hulls: Menu, left: int) -> list[tuple[float, dict[str, Option]]]:
    """The picks of the large tensors that fit, each with a loss that no mix with them is below, the
    least first: the one that parts of steps would reach.
    """
    large = _large(hulls)
    rest = {name: points for name, points in hulls.items() if name not in large}
    steps = _steps(rest)
    spent = list(
        accumulate(
            (step.nbytes for step in steps),
            initial=sum(points[0].nbytes for points in rest.values()),
        )
    )
    losses = list(
        accumulate(
            (step.loss for step in steps), initial=sum(points[0].loss for points in rest.values())
        )
    )
    found = []
    for picks in product(*(menu[name] for name in large)) if large else ():
        room = left - sum(pick.nbytes for pick in picks)
        if room < spent[0]:
            continue
        at = bisect_right(spent, room) - 1
        part = steps[at].slope * (room - spent[at]) if at < len(steps) else 0.0
        bound = losses[at] + part + sum(pick.loss for pick in picks)
        found.append((bound, dict(zip(large, picks, strict=True))))
    return sorted(found, key=lambda way: way[0])


def _large(hulls: Menu) -> list[str]:
    """The tensors whose types may take the most bytes more or less, where that is much of what all
    may.
    """
    spans = {name: points[-1].nbytes - points[0].nbytes for name, points in hulls.items()}
    most = sorted(spans, key=lambda name: (-spans[name], name))[:MOST_LARGE]
    return [name for name in most if spans[name] > LARGE * sum(spans.values())]


def _steps(hulls: Menu) -> list[_Step]:
    """The steps down all hulls, those that gain most a byte first."""
    steps = [
        _Step(_slope(one, other), name, other, other.nbytes - one.nbytes, other.loss - one.loss)
        for name, points in hulls.items()
        for one, other in pairwise(points)
    ]
    return sorted(steps, key=lambda step: (step.slope, step.name))


def _stepped(menu: Menu, hulls: Menu, left: int) -> Allocation:
    """Steps down the hulls as far as the bytes that are `left` go; the least of them must fit."""
    picks = {name: points[0] for name, points in hulls.items()}
    left -= sum(pick.nbytes for pick in picks.values())
    for step in _steps(hulls):
        if step.nbytes > left:  # the multiplier is found: what is left over is the greedy filling's
            break
        picks[step.name], left = step.option, left - step.nbytes
    return Allocation(_filled(menu, picks, left))


def _filled(menu: Menu, picks: Mapping[str, Option], left: int) -> dict[str, Option]:
    """The rest of the budget spent, largest gain first; then on what only takes more bytes,
    nothing.
    """
    found = dict(picks)
    while True:
        better = [
            (found[name].loss - option.loss, name, option)
            for name, options in menu.items()
            for option in options
            if option.loss < found[name].loss and option.nbytes - found[name].nbytes <= left
        ]
        if not better:
            return found
        _, name, option = max(better, key=lambda one: one[:2])
        left -= option.nbytes - found[name].nbytes
        found[name] = option


def few(menu: Menu, budget: Budget, most: int = MOST_TYPES) -> Allocation:
    """The best mix of few types: one after another is given up while there are more than `most` and
    it costs little.
    """
    best = allocate(menu, budget)
    while len(best.types) > most:
        tried = []
        for kind in best.types:
            less = without(menu, kind)
            if less and in_reach(less, budget):
                tried.append((allocate(less, budget).loss, kind, less))
        if not tried:
            break
        loss, _, less = min(tried, key=lambda one: one[:2])
        if loss > best.loss * (1 + LITTLE):
            break
        menu, best = less, allocate(less, budget)
    return best


def without(menu: Menu, kind: str) -> Menu | None:
    """The menu without a type; None where a tensor then has none left."""
    less = {
        name: [option for option in options if option.type != kind]
        for name, options in menu.items()
    }
    return less if all(less.values()) else None


def weighed(menu: Menu, factors: Mapping[str, float]) -> Menu:
    """The menu with some tensors' losses taken for larger or smaller than they are."""
    return {
        name: [replace(option, loss=option.loss * factors.get(name, 1.0)) for option in options]
        for name, options in menu.items()
    }
