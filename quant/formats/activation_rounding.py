"""The error that llama.cpp's 8-bit rounding of activations adds to the product of a weight and its
input.

On a CPU, llama.cpp rounds the inputs of a quantized weight to 8 bits, in blocks with one scale,
absmax / 127. A block has 256 values (Q8_K) for the k-quants and similar types, and 32 values (Q8_0,
Q8_1) for the other types (ggml-cpu.c, type_traits_cpu, vec_dot_type). The rounding error of an
input is taken as uniform, with variance scale^2 / 12. The expected absmax^2 of a block is computed
from the inputs' mean squares alone, as if the inputs were independent and Gaussian. This is
accurate enough, because the error only matters for weights of about Q6_K and above.
"""

import functools
import math
from typing import TYPE_CHECKING

from quant.native import ggml

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32

MAX_CODE = 127
INTEGRAL_POINTS = 40  # points of the numerical integral, evenly spaced in the logarithm
# Range of the integral, relative to the largest mean square of the block.
INTEGRAL_START, INTEGRAL_END = 1e-3, 40.0
# The error function is tabulated up to ERF_TABLE_END. Above that it is 1 in float32.
ERF_TABLE_END, ERF_TABLE_POINTS = 4.0, 1 << 14


def activation_block(name: str) -> int:
    """Return the number of inputs that llama.cpp rounds with one scale when it multiplies a weight
    of type `name`. Return 0 if it does not round inputs for this type.
    """
    if not ggml.is_quantized(name):
        return 0
    return 256 if ggml.block_size(name).values == 256 else 32


def rounding_variances(means: "F32", size: int) -> "F32":
    """Return the variance [columns] of the rounding error of each input, given the inputs' mean
    squares (`means` [columns]). Blocks of `size` inputs share a scale.
    """
    import numpy as np

    blocks = means.reshape(-1, size)
    return np.repeat(expected_largest_square(blocks) / (12 * MAX_CODE**2), size).astype(np.float32)


def expected_largest_square(means: "F32") -> "F32":
    """Return the expected value of the largest x^2 in each block [blocks], for independent Gaussian
    values x with the mean squares `means` [blocks, values].

    It is the integral over t of the probability that the largest x^2 is above t.
    """
    import numpy as np

    largest_means = np.maximum(means.max(1), 1e-30)
    edges = np.geomspace(INTEGRAL_START, INTEGRAL_END, INTEGRAL_POINTS + 1)
    deviations = np.sqrt(np.maximum(means, 1e-12 * largest_means[:, None]) / largest_means[:, None])
    probabilities_below = np.stack(
        [np.exp(np.log(_erf(np.sqrt(edge / 2) / deviations)).sum(1)) for edge in edges], 1
    )
    expected: F32 = largest_means * (
        INTEGRAL_START
        + (
            (1 - (probabilities_below[:, 1:] + probabilities_below[:, :-1]) / 2) * np.diff(edges)
        ).sum(1)
    )
    return expected


def _erf(values: "F32") -> "F32":
    """Return the error function of positive values, accurate to 2e-8. It is interpolated in a
    table, because numpy has no erf.
    """
    import numpy as np

    points, table = _erf_table()
    result: F32 = np.clip(np.interp(values, points, table), 1e-12, 1.0).astype(np.float32)
    return result


@functools.cache
def _erf_table() -> tuple["NDArray[np.float64]", "NDArray[np.float64]"]:
    """Return evenly spaced points and the error function at each."""
    import numpy as np

    points = np.linspace(0, ERF_TABLE_END, ERF_TABLE_POINTS)
    return points, np.fromiter(map(math.erf, points), np.float64)
