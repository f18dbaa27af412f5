"""Scales, which map values to positions, and axis limits, round ticks and short number formats."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TICK_STEPS = (1, 2, 2.5, 5, 10)  # ticks are multiples of one of these times a power of ten
DECADE_DIGITS = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 2, 3, 5, 7),
    tuple(range(1, 10)),
)  # for a log axis, the digits at which each decade may have ticks, from few ticks to many


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values between `low` and `high` to positions between `start` and `end`. `end` may be
    less than `start`, as for a y axis.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value. A value outside the limits gets the position of the
        nearest limit.
        """
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def contains(self, value: float) -> bool:
        """Return whether the value is between the limits."""
        return self.low <= value <= self.high

    def ticks(self, max_ticks: int) -> list[float]:
        """Return round values between the limits: about `max_ticks` of them, and at least two."""
        return (
            log_ticks(self.low, self.high, max_ticks)
            if self.is_log
            else linear_ticks(self.low, self.high, max_ticks)
        )


def axis_limits(
    values: Iterable[float], log: bool = False, from_zero: bool = True
) -> tuple[float, float]:
    """Return the limits of an axis that includes all values.

    By default, it starts at 0, or at the smallest value if that is negative, and ends at a round
    number above the largest value. `from_zero` False: it starts at a round number below the
    smallest value. `log`: it extends a fifth of a decade beyond the values on both sides.
    """
    numbers = list(values)
    if log:
        margin = 10**0.2
        return min(numbers) / margin, max(numbers) * margin
    low, high = (
        (min(0.0, *numbers), max(0.0, *numbers)) if from_zero else (min(numbers), max(numbers))
    )
    if low == high:
        return (0.0, 1.0) if low == 0 else (low - abs(low) / 10, high + abs(high) / 10)
    step = _step(high - low, 6)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def linear_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return the multiples of a round step from `low` to `high`. The step is 1, 2, 2.5 or 5 times a
    power of ten.
    """
    step = _step(high - low, max(2, max_ticks))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)]


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return about `max_ticks` ticks for a log axis: powers of ten, or multiples of these. For a
    short range, return linear ticks.
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    best: list[float] = []
    for digits in DECADE_DIGITS:
        candidates = [
            value for e in exponents for d in digits if low <= (value := float(f"{d}e{e}")) <= high
        ]
        if len(candidates) > max(2, max_ticks):
            break
        best = candidates
    if len(best) >= 2:
        return best
    powers = [value for e in exponents if low <= (value := float(f"1e{e}")) <= high]
    if len(powers) > 2:
        return powers[:: -(-len(powers) // max(2, max_ticks))]
    return linear_ticks(low, high, max_ticks)


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with up to `digits` significant digits, without trailing zeros: 1234567 ->
    '1,234,567', 0.51234 -> '0.5123'.
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e15 or size < 1e-6:
        return f"{value:.3g}"
    if value == int(value):
        return f"{value:,.0f}"
    text = f"{value:,.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_ticks(values: Sequence[float]) -> list[str]:
    """Format the ticks of an axis, with thousands separators and no more digits than needed."""
    return [f"{value:,.10g}" if abs(value) < 1e15 else f"{value:.0e}" for value in values]


def _step(span: float, most: int) -> float:
    """Return the smallest round step of which at most `most` fit into `span`."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(
        (power * step for step in TICK_STEPS if span / (power * step) <= most + 1e-9), power * 10
    )
