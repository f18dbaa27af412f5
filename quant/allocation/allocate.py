"""Choice of a type for each tensor, so that a file has a given size and the least loss.

Each tensor has options: types, with the bytes that they take and the divergence that they cost (the
loss). The loss of a file is the sum over its tensors. All tensors start at their smallest option.
Each tensor can then move, step by step, along the lower convex hull of its options in the plane of
bytes and loss. Steps of all tensors are taken in the order of their gain per byte, so that after
each step the mix of types is optimal for its number of bytes (it solves the Lagrangian for some
multiplier). When no further step fits, the remaining bytes are spent on any options that still fit,
largest reduction of the loss first.

A single tensor, such as an embedding, may be most of a model, and one step of this tensor may
exceed all remaining bytes. Therefore every combination of types of the largest tensors is tried,
and the best resulting mix is returned.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from quant.errors import UserError

MAX_TYPES = 5  # types that a file should have at most, because each type needs its own kernels
# A type is dropped to respect MAX_TYPES only if the loss grows by at most this share.
MAX_LOSS_GROWTH = 0.02
# A tensor is large if its options differ by more than this share of the bytes that types decide.
LARGE_SHARE = 0.05
MAX_LARGE_TENSORS = 2  # number of large tensors whose types are all tried
SIZE_TOLERANCE = 0.003  # share of the target size by which a file may be smaller without a message


@dataclass(frozen=True, slots=True)
class TypeOption:
    """One type that a tensor may get. `nbytes` are the bytes of the tensor in the file, padding
    included, and `loss` is the divergence that the type costs.
    """

    type: str
    nbytes: int
    loss: float


TypeMenu = Mapping[str, Sequence[TypeOption]]


@dataclass(frozen=True, slots=True)
class _Step:
    """A change of one tensor from an option on its hull to the next larger one, `option`. `nbytes`
    are the added bytes, `loss` is the added loss (negative), and `slope` is the added loss per
    byte.
    """

    slope: float
    name: str
    option: TypeOption
    nbytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The size that a file may have. `max_bytes` limits the whole file, and `fixed_bytes` are the
    bytes in it that do not depend on the chosen types.
    """

    max_bytes: int
    fixed_bytes: int = 0

    @property
    def tensor_bytes(self) -> int:
        """Bytes that remain for the tensors whose types are chosen."""
        return self.max_bytes - self.fixed_bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """A mix: the chosen option of every tensor, by tensor name."""

    options: Mapping[str, TypeOption]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in their chosen types."""
        return sum(pick.nbytes for pick in self.options.values())

    @property
    def loss(self) -> float:
        """Divergence that all chosen types cost together."""
        return sum(pick.loss for pick in self.options.values())

    @property
    def mix(self) -> dict[str, str]:
        """The chosen types by tensor name."""
        return {name: pick.type for name, pick in self.options.items()}

    @property
    def types(self) -> tuple[str, ...]:
        """The types of this mix, the type with the most bytes first."""
        type_bytes: dict[str, int] = {}
        for pick in self.options.values():
            type_bytes[pick.type] = type_bytes.get(pick.type, 0) + pick.nbytes
        return tuple(sorted(type_bytes, key=lambda kind: (-type_bytes[kind], kind)))


def lower_hull(options: Iterable[TypeOption]) -> tuple[TypeOption, ...]:
    """Return the options on the lower convex hull of loss over bytes, smallest first. Each option
    on the hull gains less per added byte than the option before it.
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
    """Return the change of the loss per added byte between two options. It is negative."""
    return (larger.loss - smaller.loss) / (larger.nbytes - smaller.nbytes)


def size_range(menu: TypeMenu) -> tuple[int, int]:
    """Return the bytes of all tensors with their smallest options, and with the largest options on
    their hulls.
    """
    hulls = [lower_hull(options) for options in menu.values()]
    return sum(points[0].nbytes for points in hulls), sum(points[-1].nbytes for points in hulls)


def is_reachable(menu: TypeMenu, budget: Budget) -> bool:
    """Return whether some mix has about the size of the budget: the smallest mix fits, and the
    largest mix fills the budget up to SIZE_TOLERANCE.
    """
    smallest, largest = size_range(menu)
    return (
        smallest <= budget.tensor_bytes
        and budget.max_bytes * (1 - SIZE_TOLERANCE) <= largest + budget.fixed_bytes
    )


def unreachable_error(menu: TypeMenu, budget: Budget) -> UserError:
    """Return the error that no mix has the size of the budget. It names the smallest and the
    largest possible file.
    """
    smallest, largest = size_range(menu)
    return UserError(
        f"no mix of these types makes a file of {budget.max_bytes:,} bytes: "
        f"the smallest has {smallest + budget.fixed_bytes:,}, the largest {largest + budget.fixed_bytes:,}",
        hint="choose a size between them, or other types with --types",
    )


def allocate(menu: TypeMenu, budget: Budget) -> Allocation:
    """Return the mix with the least loss within the budget.

    Raises UserError with the reachable sizes if no mix fits, or if even the largest mix is much
    smaller than the budget.
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
    menu: TypeMenu, hulls: TypeMenu, budget_bytes: int
) -> list[tuple[float, dict[str, TypeOption]]]:
    """Return all combinations of options of the largest tensors that fit into `budget_bytes`, as
    (bound, options by tensor name), smallest bound first.

    `bound` is a lower bound of the loss of every mix with these options. It is the loss that the
    remaining tensors would reach if a fraction of a step could be taken, so that no real mix is
    better.
    """
    large = _large_tensors(hulls)
    other_hulls = {name: points for name, points in hulls.items() if name not in large}
    steps = _steps(other_hulls)
    used_bytes = list(
        accumulate(
            (step.nbytes for step in steps),
            initial=sum(points[0].nbytes for points in other_hulls.values()),
        )
    )
    losses = list(
        accumulate(
            (step.loss for step in steps),
            initial=sum(points[0].loss for points in other_hulls.values()),
        )
    )
    choices = []
    for picks in product(*(menu[name] for name in large)) if large else ():
        available = budget_bytes - sum(pick.nbytes for pick in picks)
        if available < used_bytes[0]:
            continue
        last = bisect_right(used_bytes, available) - 1
        fraction_loss = (
            steps[last].slope * (available - used_bytes[last]) if last < len(steps) else 0.0
        )
        bound = losses[last] + fraction_loss + sum(pick.loss for pick in picks)
        choices.append((bound, dict(zip(large, picks, strict=True))))
    return sorted(choices, key=lambda choice: choice[0])


def _large_tensors(hulls: TypeMenu) -> list[str]:
    """Return at most MAX_LARGE_TENSORS tensors whose options differ most in bytes, each only if its
    difference exceeds LARGE_SHARE of the sum over all tensors.
    """
    spans = {name: points[-1].nbytes - points[0].nbytes for name, points in hulls.items()}
    widest = sorted(spans, key=lambda name: (-spans[name], name))[:MAX_LARGE_TENSORS]
    return [name for name in widest if spans[name] > LARGE_SHARE * sum(spans.values())]


def _steps(hulls: TypeMenu) -> list[_Step]:
    """Return the steps along the hulls of all tensors, the largest gain per byte first."""
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


def _take_steps(menu: TypeMenu, hulls: TypeMenu, budget_bytes: int) -> Allocation:
    """Return the mix that results from steps along the hulls, starting from the smallest options,
    which must fit into `budget_bytes`. The first step that does not fit ends the steps, and the
    remaining bytes are spent by _fill().
    """
    picks = {name: points[0] for name, points in hulls.items()}
    free_bytes = budget_bytes - sum(pick.nbytes for pick in picks.values())
    for step in _steps(hulls):
        # later steps gain less per byte, so they are not tried
        if step.nbytes > free_bytes:
            break
        picks[step.name], free_bytes = step.option, free_bytes - step.nbytes
    return Allocation(_fill(menu, picks, free_bytes))


def _fill(
    menu: TypeMenu, picks: Mapping[str, TypeOption], free_bytes: int
) -> dict[str, TypeOption]:
    """Return the options after `free_bytes` are spent on changes of single tensors to any better
    option that fits, largest reduction of the loss first.
    """
    filled = dict(picks)
    while True:
        improvements = [
            (filled[name].loss - option.loss, name, option)
            for name, options in menu.items()
            for option in options
            if option.loss < filled[name].loss and option.nbytes - filled[name].nbytes <= free_bytes
        ]
        if not improvements:
            return filled
        _, name, option = max(improvements, key=lambda candidate: candidate[:2])
        free_bytes -= option.nbytes - filled[name].nbytes
        filled[name] = option


def reduce_types(menu: TypeMenu, budget: Budget, max_types: int = MAX_TYPES) -> Allocation:
    """Return the best mix with at most `max_types` types, because every type in a file needs its
    own kernels.

    While the best mix has more types, the type whose absence costs least is dropped from the menu.
    If the loss would grow by more than MAX_LOSS_GROWTH, the mix keeps all its remaining types.
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
    """Return the menu without the type `kind`, or None if some tensor would have no option left."""
    reduced = {
        name: [option for option in options if option.type != kind]
        for name, options in menu.items()
    }
    return reduced if all(reduced.values()) else None


def scale_losses(menu: TypeMenu, factors: Mapping[str, float]) -> TypeMenu:
    """Return the menu with the losses of each tensor in `factors` multiplied by that tensor's
    factor.
    """
    return {
        name: [replace(option, loss=option.loss * factors.get(name, 1.0)) for option in options]
        for name, options in menu.items()
    }
