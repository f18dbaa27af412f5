"""How far values are apart from those they stand for: sums of squares, and the relative RMS that
these come to.
"""

from math import isfinite, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def squares(values: "NDArray[np.floating]") -> float:
    """The sum of the squares, in float64."""
    import numpy as np

    return float(np.square(values, dtype=np.float64).sum())


def relative(noise: float, signal: float) -> float | None:
    """The relative RMS of a difference, from both sums of squares; None where NaN, infinity or a
    signal of 0 hides it.
    """
    if not noise:
        return 0.0
    return sqrt(noise / signal) if signal and isfinite(noise) and isfinite(signal) else None
