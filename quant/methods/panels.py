"""The grids of the evenly spaced formats on torch tensors: column-major, one row of the weight in each column.

A panel is [columns, rows]: what belongs to one column of the weight lies together, so that a step from column to column
works on long vectors. Here stand what a block can hold and the search for its scales; bytes are quant/formats'.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.formats.base import Linear

STARTS = (-0.9, -0.45, 0.0, 0.45, 0.9)  # how much more than the range of the codes a first scale spans
ROUNDS = 3  # of codes and least squares from each start
NOISE = 1e-7  # of the weighted squares of a group: what sums of F32 make of an error of zero
OUTER = (-0.4, 0.0, 0.4)  # the same for the scale of the scales


@dataclass(frozen=True, slots=True)
class Kind:
    """What a block of a format holds: `groups` scales within `scales`, or one without.

    Levels are codes less the code of zero.
    """

    name: str
    size: int
    groups: int = 1
    scales: tuple[int, int] | None = None
    mins: int | None = None  # the highest minimum; 0 where it is a number of its own

    @property
    def span(self) -> int:
        """Columns of a group."""
        return self.size // self.groups


KINDS = {
    kind.name: kind
    for kind in (
        Kind("Q2_K", 256, 16, (0, 15), 15),
        Kind("Q3_K", 256, 16, (-32, 31)),
        Kind("Q4_K", 256, 8, (0, 63), 63),
        Kind("Q5_K", 256, 8, (0, 63), 63),
        Kind("Q6_K", 256, 16, (-128, 127)),
        Kind("Q4_0", 32),
        Kind("Q5_0", 32),
        Kind("Q8_0", 32),
        Kind("Q4_1", 32, mins=0),
        Kind("Q5_1", 32, mins=0),
    )
}


@dataclass(frozen=True, slots=True)
class Levels:
    """The whole numbers that codes stand for: `low` to `high`."""

    low: int
    high: int

    @staticmethod
    def of(format: "Linear") -> "Levels":
        """Those of a format."""
        return Levels(format.low - format.zero, format.high - format.zero)


@dataclass(frozen=True)
class Grid:
    """One block of each row: `d` and `m` [rows] are F16 numbers, `scales` and `mins` [groups, rows] whole ones."""

    kind: Kind
    levels: Levels
    d: Any
    m: Any = None
    scales: Any = None
    mins: Any = None

    def steps(self) -> tuple[Any, Any]:
        """The step and the least value [groups, rows] of each group, rounded as ggml rounds them."""
        step = self.d[None] if self.scales is None else self.d * self.scales
        if self.m is None:
            return step, None
        return step, self.m[None] if self.mins is None else -(self.m * self.mins)

    def value(self, levels: Any) -> Any:
        """What levels [columns, rows] stand for."""
        step, least = self.steps()
        found = levels.view(self.kind.groups, -1, levels.shape[1]) * step[:, None]
        if least is not None:
            found += least[:, None]
        return found.view_as(levels)


def half(numbers: Any) -> Any:
    """Rounded to F16; what is too large is infinite, and refused later."""
    return numbers.half().float()


def inverse(numbers: Any) -> Any:
    """1 / numbers, 0 for 0."""
    return (1 / numbers).masked_fill_(numbers == 0, 0)


def search(kind: Kind, levels: Levels, values: Any, weights: Any) -> Grid:
    """Scales and minimums for the values [size, rows] of a block, columns weighed by `weights` [size].

    Alternating least squares per group from several starts, then whole numbers for the scales and an F16 for theirs,
    each scale weighed by its group: section 11 of the project's notes on quantization.
    """
    rows = values.shape[1]
    values, weights = values.view(kind.groups, -1, rows), weights.view(kind.groups, -1, 1)
    if kind.mins is None:
        step, least = _symmetric(levels, values, weights), None
    else:
        step, least = _ranged(levels, values, weights, clamped=kind.mins > 0)
    if kind.scales is None:
        return Grid(kind, levels, half(step[0]), None if least is None else half(least[0]))
    total = weights.sum(1)
    d, scales = _whole(step, total, *kind.scales)
    if least is None or kind.mins is None:
        return Grid(kind, levels, d, scales=scales)
    m, mins = _whole(-least, total, 0, kind.mins)
    return Grid(kind, levels, d, m, scales, mins)


def _rounded(levels: Levels, values: Any, step: Any, least: Any = None) -> Any:
    over = inverse(step)[:, None]
    numbers = values * over if least is None else (values - least[:, None]).mul_(over)
    return numbers.round_().clamp_(levels.low, levels.high)


class _Best:
    """The candidates with the least error so far, place by place."""

    def __init__(self) -> None:
        self.error: Any = None
        self.found: tuple[Any, ...] = ()

    def offer(self, error: Any, *found: Any) -> None:
        if self.error is None:
            self.error, self.found = error, found
            return
        better = error < self.error
        self.error = error.where(better, self.error)
        self.found = tuple(new.where(better, old) for new, old in zip(found, self.found, strict=True))


def _ranged(levels: Levels, values: Any, weights: Any, *, clamped: bool) -> tuple[Any, Any]:
    """Scale and minimum of each group; `clamped` minimums are never above zero."""
    best, heavy = _Best(), weights * values
    lowest, most = values.amin(1), values.amax(1)
    if clamped:
        lowest = lowest.clamp(max=0)
    sw, sx, sxx = weights.sum(1), heavy.sum(1), (heavy * values).sum(1)
    for start in STARTS:
        step, least = (most - lowest) / (levels.high + start), lowest
        for _ in range(ROUNDS):
            codes = _rounded(levels, values, step, least)
            sxl = (heavy * codes).sum(1)
            weighed = weights * codes
            sl, sll = weighed.sum(1), weighed.mul_(codes).sum(1)
            det = sw * sll - sl * sl
            sound = det > 1e-9 * sw * sll
            step = ((sw * sxl - sx * sl) / det).where(sound, step)  # codes all alike leave it open
            least = (sx - step * sl) / sw
            if clamped:
                above = least > 0
                step, least = (sxl / sll).where(above & (sll > 0), step), least.masked_fill(above, 0)
        codes = _rounded(levels, values, step, least)
        sxl = (heavy * codes).sum(1)
        weighed = weights * codes
        sl, sll = weighed.sum(1), weighed.mul_(codes).sum(1)
        error = sxx - 2 * (step * sxl + least * sx) + step * step * sll + 2 * step * least * sl + least * least * sw
        best.offer(error.maximum(NOISE * sxx), step, least)  # among equals the first: groups alike get scales alike
    return best.found[0], best.found[1]


def _symmetric(levels: Levels, values: Any, weights: Any) -> Any:
    """Scale of each group, of either sign; zero is a level."""
    best, heavy = _Best(), weights * values
    place = values.abs().argmax(1, keepdim=True)
    farthest = values.gather(1, place)[:, 0]
    for start in STARTS:
        for side in (levels.low - start, start - levels.low):
            step = farthest / side
            for _ in range(ROUNDS):
                codes = _rounded(levels, values, step)
                sxl, sll = (heavy * codes).sum(1), (weights * codes).mul_(codes).sum(1)
                step = (sxl / sll).where(sll > 0, step)
            codes = _rounded(levels, values, step)
            sxl, sll = (heavy * codes).sum(1), (weights * codes).mul_(codes).sum(1)
            best.offer(step * (step * sll - 2 * sxl), step)
    return best.found[0]


def _whole(numbers: Any, weights: Any, low: int, high: int) -> tuple[Any, Any]:
    """An F16 [rows] and whole numbers low .. high [groups, rows] whose products are near `numbers` [groups, rows]."""
    best = _Best()
    place = numbers.abs().argmax(0, keepdim=True)
    farthest = numbers.gather(0, place)[0]
    for more in OUTER:
        for end in (high,) if low == 0 else (high, low):
            unit = farthest / (end + more)
            for _ in range(2):
                counts = (numbers * inverse(unit)).round_().clamp_(low, high)
                squares = (weights * counts * counts).sum(0)
                unit = ((weights * numbers * counts).sum(0) / squares).where(squares > 0, unit)
            unit = half(unit)
            counts = (numbers * inverse(unit)).round_().clamp_(low, high)
            best.offer((weights * (numbers - unit * counts).square_()).sum(0), unit, counts)
    return best.found[0], best.found[1]
