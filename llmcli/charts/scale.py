"""The arithmetic of chart axes: limits, round tick values, the mapping from values to positions,
and the format of numbers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The distance between ticks is one of these numbers times a power of ten.
TICK_STEPS = (1, 2, 2.5, 5, 10)
# Choices for the ticks of a log axis, from few ticks to many. For example, (1, 2, 5) puts ticks at
# 1, 2, 5, 10, 20, 50, ...
DECADE_DIGITS = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 2, 3, 5, 7),
    tuple(range(1, 10)),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the values of an axis from `low` to `high` to positions from `start` to `end`, linearly
    or logarithmically. `end` is less than `start` for the y axis of an SVG, where y grows downward.
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
        """Return round values between `low` and `high` for tick marks: at most about `max_ticks`,
        and at least two.
        """
        return (
            log_ticks(self.low, self.high, max_ticks)
            if self.is_log
            else linear_ticks(self.low, self.high, max_ticks)
        )


def axis_limits(
    values: Iterable[float], log: bool = False, from_zero: bool = True
) -> tuple[float, float]:
    """Return the lower and the upper limit of an axis that must include all values.

    A linear axis has round numbers as limits. With `from_zero` it includes 0. A logarithmic axis
    (`log`) extends a fifth of a decade beyond the values at both ends.
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
    """Return tick values for a linear axis: the multiples, from `low` to `high`, of a round step.
    The step is 1, 2, 2.5 or 5 times a power of ten.
    """
    step = _step(high - low, max(2, max_ticks))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)]


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return about `max_ticks` tick values for a log axis from `low` to `high`: powers of ten and
    round multiples of these. If the range contains fewer than two such numbers, return linear
    ticks.
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
    """Return tick values as texts with thousands separators and without trailing zeros."""
    return [f"{value:,.10g}" if abs(value) < 1e15 else f"{value:.0e}" for value in values]


def _step(length: float, max_steps: int) -> float:
    """Return the smallest round step that fits at most `max_steps` times into `length`, which is
    the difference of two axis values.
    """
    power = 10.0 ** math.floor(math.log10(length / max_steps))
    return next(
        (power * step for step in TICK_STEPS if length / (power * step) <= max_steps + 1e-9),
        power * 10,
    )
