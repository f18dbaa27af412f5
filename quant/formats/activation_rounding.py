"""The error that llama.cpp's 8-bit rounding of activations adds to a product.

On a CPU, llama.cpp multiplies a quantized weight with inputs that it rounds in blocks with one
scale, absmax / 127. A block has 256 values (Q8_K) for the k-quants and similar types, and 32 values
(Q8_0, Q8_1) for the others (ggml-cpu.c, type_traits_cpu, vec_dot_type). The rounding error of a
value is taken as uniform, with variance scale^2 / 12. The expected absmax^2 of a block is computed
from the inputs' mean squares alone, as if the values were independent and Gaussian. This is
accurate enough, because the term only matters at about Q6_K and above.
"""

import math
from typing import TYPE_CHECKING

from quant.native import ggml

if TYPE_CHECKING:
    from quant.native.ggml import F32

MAX_CODE = 127
INTEGRAL_POINTS = 40  # points of the numerical integral, evenly spaced in the logarithm
# The range of the integral relative to the largest mean square.
INTEGRAL_START, INTEGRAL_END = 1e-3, 40.0
# The error function is tabulated up to here; beyond, it is 1 in float32.
ERF_TABLE_END, ERF_TABLE_POINTS = 4.0, 1 << 14


def activation_block(name: str) -> int:
    """Return the number of inputs that share a scale when llama.cpp multiplies a weight of this
    type; 0 if it does not round inputs for this type.
    """
    if not ggml.is_quantized(name):
        return 0
    return 256 if ggml.block_size(name).values == 256 else 32


def rounding_variances(means: "F32", size: int) -> "F32":
    """Return the variance [columns] of the rounding error of inputs with these mean squares
    [columns].
    """
    import numpy as np

    blocks = means.reshape(-1, size)
    return np.repeat(expected_largest_square(blocks) / (12 * MAX_CODE**2), size).astype(np.float32)


def expected_largest_square(means: "F32") -> "F32":
    """Return the expected largest square [blocks] of independent Gaussian values with mean squares
    [blocks, values].
    """
    import numpy as np

    top = np.maximum(means.max(1), 1e-30)
    edges = np.geomspace(INTEGRAL_START, INTEGRAL_END, INTEGRAL_POINTS + 1)
    ratio = np.sqrt(np.maximum(means, 1e-12 * top[:, None]) / top[:, None])
    below = np.stack([np.exp(np.log(_erf(np.sqrt(edge / 2) / ratio)).sum(1)) for edge in edges], 1)
    expected: F32 = top * (
        INTEGRAL_START + ((1 - (below[:, 1:] + below[:, :-1]) / 2) * np.diff(edges)).sum(1)
    )
    return expected


def _erf(values: "F32") -> "F32":
    """Return the error function of positive values to 2e-8, from a table: numpy has no erf."""
    import numpy as np

    points = np.linspace(0, ERF_TABLE_END, ERF_TABLE_POINTS)
    table = [math.erf(point) for point in points]
    result: F32 = np.clip(np.interp(values, points, table), 1e-12, 1.0).astype(np.float32)
    return result
