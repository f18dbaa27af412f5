"""Choice of a type for each tensor, so that a file has a given size and the least loss.

A tensor's options are types with the bytes they take and the divergence they cost. The loss of a
file is the sum of the losses of its tensors. Each tensor starts at its smallest option and moves
down the lower convex hull of its options. The steps of all tensors are taken in the order of their
gain per byte: after each step the mix is optimal for its number of bytes (it solves the Lagrangian
for some multiplier). The remaining budget is then spent on any option that still fits, largest
reduction of the loss first.

A single tensor, such as an embedding, may be most of a model, and one of its steps may exceed all
remaining bytes. Therefore each type of the largest tensors is tried in turn, and the best resulting
mix is taken.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from quant.errors import UserError

MAX_TYPES = 5  # most types in a file, if fewer cost little: each type needs its own kernels
# MAX_TYPES is enforced only while dropping a type adds at most this share of the loss
MAX_LOSS_GROWTH = 0.02
# share of all bytes that types decide, above which each type of a tensor is tried in turn
LARGE_SHARE = 0.05
MAX_LARGE_TENSORS = 2  # most tensors whose types are tried in turn
SIZE_TOLERANCE = 0.003  # share of the target by which a file may be smaller without a warning


@dataclass(frozen=True, slots=True)
class TypeOption:
    """A type for one tensor: the bytes it takes in the file, padding included, and the divergence
    it costs.
    """

    type: str
    nbytes: int
    loss: float


TypeMenu = Mapping[str, Sequence[TypeOption]]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step down a tensor's hull, to `option` from the option before it: added bytes, added loss
    (negative), and loss per byte.
    """

    slope: float
    name: str
    option: TypeOption
    nbytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest size of the whole file, `max_bytes`, and the part of it that does not depend on
    the types, `fixed_bytes`.
    """

    max_bytes: int
    fixed_bytes: int = 0

    @property
    def tensor_bytes(self) -> int:
        """Bytes available to the tensors."""
        return self.max_bytes - self.fixed_bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """The chosen option of every tensor."""

    options: Mapping[str, TypeOption]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(pick.nbytes for pick in self.options.values())

    @property
    def loss(self) -> float:
        """Total divergence of all tensors."""
        return sum(pick.loss for pick in self.options.values())

    @property
    def mix(self) -> dict[str, str]:
        """The type of each tensor by name."""
        return {name: pick.type for name, pick in self.options.items()}

    @property
    def types(self) -> tuple[str, ...]:
        """The types in use, the one with the most bytes first."""
        type_bytes: dict[str, int] = {}
        for pick in self.options.values():
            type_bytes[pick.type] = type_bytes.get(pick.type, 0) + pick.nbytes
        return tuple(sorted(type_bytes, key=lambda kind: (-type_bytes[kind], kind)))


def lower_hull(options: Iterable[TypeOption]) -> tuple[TypeOption, ...]:
    """Return the options on the lower convex hull of loss over bytes, smallest first: each step
    gains less per byte than the one before it.
    """
    points: list[TypeOption] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.loss)):
        if points and option.loss >= points[-1].loss:
            continue
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-2], option):
            points.pop()
        points.append(option)
    return tuple(points)


def _slope(smaller: TypeOption, larger: TypeOption) -> float:
    """Return the loss per byte between two options, which is negative."""
    return (larger.loss - smaller.loss) / (larger.nbytes - smaller.nbytes)


def size_range(menu: TypeMenu) -> tuple[int, int]:
    """Return the bytes of all tensors in their smallest options and in their largest options on the
    hulls.
    """
    hulls = [lower_hull(options) for options in menu.values()]
    return sum(points[0].nbytes for points in hulls), sum(points[-1].nbytes for points in hulls)


def is_reachable(menu: TypeMenu, budget: Budget) -> bool:
    """Return whether some mix fits into the budget, and the largest mix fills it up to
    SIZE_TOLERANCE.
    """
    least, most = size_range(menu)
    return (
        least <= budget.tensor_bytes
        and budget.max_bytes * (1 - SIZE_TOLERANCE) <= most + budget.fixed_bytes
    )


def unreachable_error(menu: TypeMenu, budget: Budget) -> UserError:
    """Return the error for a budget that no mix can meet."""
    least, most = size_range(menu)
    return UserError(
        f"no mix of these types makes a file of {budget.max_bytes:,} bytes: "
        f"the smallest has {least + budget.fixed_bytes:,}, the largest {most + budget.fixed_bytes:,}",
        hint="choose a size between them, or other types with --types",
    )


def allocate(menu: TypeMenu, budget: Budget) -> Allocation:
    """Return the best mix within the budget. Raises UserError with the reachable sizes if no mix
    fits, or if even the largest mix is much smaller than the budget.
    """
    if not is_reachable(menu, budget):
        raise unreachable_error(menu, budget)
    hulls = {name: lower_hull(options) for name, options in menu.items()}
    best = _take_steps(menu, hulls, budget.tensor_bytes)
    for bound, picks in _large_choices(menu, hulls, budget.tensor_bytes):
        if bound >= best.loss:
            break
        fixed = {name: (pick,) for name, pick in picks.items()}
        best = min(
            best,
            _take_steps({**menu, **fixed}, {**hulls, **fixed}, budget.tensor_bytes),
            key=lambda allocation: allocation.loss,
        )
    return best


def _large_choices(
    menu: TypeMenu, hulls: TypeMenu, left: int
) -> list[tuple[float, dict[str, TypeOption]]]:
    """Return the combinations of options of the large tensors that fit, each with a lower bound of
    the loss of any mix that contains it, smallest bound first.

    The bound lets the other tensors take a fraction of their last step, so no mix can be better.
    """
    large = _large_tensors(hulls)
    others = {name: points for name, points in hulls.items() if name not in large}
    steps = _steps(others)
    spent = list(
        accumulate(
            (step.nbytes for step in steps),
            initial=sum(points[0].nbytes for points in others.values()),
        )
    )
    losses = list(
        accumulate(
            (step.loss for step in steps), initial=sum(points[0].loss for points in others.values())
        )
    )
    choices = []
    for picks in product(*(menu[name] for name in large)) if large else ():
        available = left - sum(pick.nbytes for pick in picks)
        if available < spent[0]:
            continue
        at = bisect_right(spent, available) - 1
        fraction_loss = steps[at].slope * (available - spent[at]) if at < len(steps) else 0.0
        bound = losses[at] + fraction_loss + sum(pick.loss for pick in picks)
        choices.append((bound, dict(zip(large, picks, strict=True))))
    return sorted(choices, key=lambda choice: choice[0])


def _large_tensors(hulls: TypeMenu) -> list[str]:
    """Return the tensors with the largest difference in bytes between their options, if that is a
    large share of the sum of all differences.
    """
    spans = {name: points[-1].nbytes - points[0].nbytes for name, points in hulls.items()}
    widest = sorted(spans, key=lambda name: (-spans[name], name))[:MAX_LARGE_TENSORS]
    return [name for name in widest if spans[name] > LARGE_SHARE * sum(spans.values())]


def _steps(hulls: TypeMenu) -> list[_Step]:
    """Return the steps down all hulls, the largest gain per byte first."""
    steps = [
        _Step(
            _slope(corner, next_corner),
            name,
            next_corner,
            next_corner.nbytes - corner.nbytes,
            next_corner.loss - corner.loss,
        )
        for name, points in hulls.items()
        for corner, next_corner in pairwise(points)
    ]
    return sorted(steps, key=lambda step: (step.slope, step.name))


def _take_steps(menu: TypeMenu, hulls: TypeMenu, left: int) -> Allocation:
    """Take steps down the hulls while they fit into `left` bytes, starting from the smallest
    options, which must fit.
    """
    picks = {name: points[0] for name, points in hulls.items()}
    left -= sum(pick.nbytes for pick in picks.values())
    for step in _steps(hulls):
        # the steps after this one gain less per byte; _fill() spends the remaining bytes
        if step.nbytes > left:
            break
        picks[step.name], left = step.option, left - step.nbytes
    return Allocation(_fill(menu, picks, left))


def _fill(menu: TypeMenu, picks: Mapping[str, TypeOption], left: int) -> dict[str, TypeOption]:
    """Spend the remaining bytes on single changes of a tensor's option, largest reduction of the
    loss first.
    """
    filled = dict(picks)
    while True:
        better = [
            (filled[name].loss - option.loss, name, option)
            for name, options in menu.items()
            for option in options
            if option.loss < filled[name].loss and option.nbytes - filled[name].nbytes <= left
        ]
        if not better:
            return filled
        _, name, option = max(better, key=lambda candidate: candidate[:2])
        left -= option.nbytes - filled[name].nbytes
        filled[name] = option


def reduce_types(menu: TypeMenu, budget: Budget, max_types: int = MAX_TYPES) -> Allocation:
    """Return the best mix with few types: while there are more than `max_types`, the type that
    costs least is dropped, unless dropping it costs too much.
    """
    best = allocate(menu, budget)
    while len(best.types) > max_types:
        candidates = []
        for kind in best.types:
            reduced = drop_type(menu, kind)
            if reduced and is_reachable(reduced, budget):
                candidates.append((allocate(reduced, budget).loss, kind, reduced))
        if not candidates:
            break
        loss, _, reduced = min(candidates, key=lambda candidate: candidate[:2])
        if loss > best.loss * (1 + MAX_LOSS_GROWTH):
            break
        menu, best = reduced, allocate(reduced, budget)
    return best


def drop_type(menu: TypeMenu, kind: str) -> TypeMenu | None:
    """Return the menu without one type, or None if a tensor would have no option left."""
    reduced = {
        name: [option for option in options if option.type != kind]
        for name, options in menu.items()
    }
    return reduced if all(reduced.values()) else None


def scale_losses(menu: TypeMenu, factors: Mapping[str, float]) -> TypeMenu:
    """Return the menu with the losses of some tensors multiplied by a factor."""
    return {
        name: [replace(option, loss=option.loss * factors.get(name, 1.0)) for option in options]
        for name, options in menu.items()
    }
