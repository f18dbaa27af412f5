"""Sums of squares and the relative RMS error of approximated values."""

from math import isfinite, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def sum_of_squares(values: "NDArray[np.floating]") -> float:
    """Return the sum of the squares of `values`, added in float64."""
    import numpy as np

    return float(np.square(values, dtype=np.float64).sum())


def relative_rms(noise: float, signal: float) -> float | None:
    """Return the relative RMS error, given the sums of squares of the differences (`noise`) and of
    the exact values (`signal`). Return None if either is NaN or infinite, or if the signal is 0.
    """
    if not noise:
        return 0.0
    return sqrt(noise / signal) if signal and isfinite(noise) and isfinite(signal) else None
