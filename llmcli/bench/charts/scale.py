"""From values to places: limits, ticks that people would have chosen, numbers as short as they may
be.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STEPS = (1, 2, 2.5, 5, 10)  # a tick is one of these times a power of ten
DECADE = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 2, 3, 5, 7),
    tuple(range(1, 10)),
)  # where log ticks stand, coarse to fine


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` laid from place `start` to place `end`, which may run backwards."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; one outside the limits stands at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def holds(self, value: float) -> bool:
        """Whether the value lies between the limits."""
        return self.low <= value <= self.high

    def ticks(self, most: int) -> list[float]:
        """At most about `most` round values between the limits, two at least."""
        return (
            log_ticks(self.low, self.high, most) if self.log else ticks(self.low, self.high, most)
        )


def limits(values: Iterable[float], log: bool = False, zero: bool = True) -> tuple[float, float]:
    """What an axis shows of values: from 0 (or the least, below it) to a round number above the
    greatest.

    A logarithmic one: a fifth of a decade more on both sides. Not from `zero`: round numbers on
    both sides.
    """
    found = list(values)
    if log:
        margin = 10**0.2
        return min(found) / margin, max(found) * margin
    low, high = (min(0.0, *found), max(0.0, *found)) if zero else (min(found), max(found))
    if low == high:
        return (0.0, 1.0) if low == 0 else (low - abs(low) / 10, high + abs(high) / 10)
    step = _step(high - low, 6)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, from `low` to `high`."""
    step = _step(high - low, max(2, most))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, thinned or with values between, so that there are about `most`; plain ticks in
    a short range.
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    best: list[float] = []
    for digits in DECADE:
        found = [
            value for e in exponents for d in digits if low <= (value := float(f"{d}e{e}")) <= high
        ]
        if len(found) > max(2, most):
            break
        best = found
    if len(best) >= 2:
        return best
    powers = [value for e in exponents if low <= (value := float(f"1e{e}")) <= high]
    if len(powers) > 2:
        return powers[:: -(-len(powers) // max(2, most))]
    return ticks(low, high, most)


def figure(value: float, digits: int = 4) -> str:
    """A number with so many digits that count, fewer where they are 0: 1234567 -> '1,234,567',
    0.51234 -> '0.5123'.
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


def tick_labels(values: Sequence[float]) -> list[str]:
    """The values of an axis: thousands with commas, no digit more than they need."""
    return [f"{value:,.10g}" if abs(value) < 1e15 else f"{value:.0e}" for value in values]


def _step(span: float, most: int) -> float:
    """The least round step that goes into `span` no more than `most` times."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(
        (power * step for step in STEPS if span / (power * step) <= most + 1e-9), power * 10
    )
