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
    """Return the relative RMS error, sqrt(noise / signal). `noise` is the sum of squares of the
    differences, and `signal` is the sum of squares of the exact values.

    Returns 0 if the noise is 0. Otherwise returns None if the signal is 0, or if either sum is NaN
    or infinite.
    """
    if not noise:
        return 0.0
    return sqrt(noise / signal) if signal and isfinite(noise) and isfinite(signal) else None
