"""The factor of second moments for error feedback: H = (I + F) D (I + F)^T, with F strictly upper
triangular.

The error that a row's change dw causes in the layer's output is dw H dw^T. With this factor it is a
sum over columns: D_j times the square of the remaining error of column j after the errors of the
columns before it have been fed in through F. Rounding column after column against that target is
GPTQ (Frantar et al. 2210.17323); without the inverse of H it is LDLQ (Chee et al. 2307.13304,
theorem 6: both are the same). One Cholesky factorization of the reversed H gives F and D without an
inverse.

H is damped by a tenth of its mean diagonal: with less damping the codes fit the calibration text
more than other text. The value is the best compromise over roles, models and texts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.native.array_backends import Array, ArrayBackend

if TYPE_CHECKING:
    from quant.native.ggml import F32

DAMPING = 0.1  # fraction of the mean of the diagonal that is added to the diagonal
DAMPING_GROWTH = 10.0  # growth of the damping when a matrix cannot be factored
MAX_DAMPING = 1e4


@dataclass(frozen=True)
class HessianFactor:
    """The damped H of one input and its factor, as F32 arrays, with the damping that was needed."""

    moments: Array  # H [columns, columns]
    # F transposed [columns, columns], strictly lower triangular: row j reads from the columns
    # before j
    feed: Array
    weights: Array  # D [columns]
    damping: float


def factor_moments(mean: "F32", ops: ArrayBackend, damping: float = DAMPING) -> HessianFactor:
    """Factor mean second moments [columns, columns], which are finite and symmetric.

    A channel without input, or fewer tokens than columns, makes H singular: damping is increased
    tenfold until the factorization succeeds. An H of zeros is replaced by the identity.
    """
    import numpy as np

    damped = mean.astype(np.float64)
    diagonal = damped.diagonal().copy()
    scale = float(diagonal.mean())
    if not scale > 0:
        damped, diagonal, scale = np.eye(len(mean)), np.ones(len(mean)), 1.0
    while True:
        np.fill_diagonal(damped, diagonal + damping * scale)
        if (udu := ops.factor_udu(damped)) is not None:
            return HessianFactor(ops.array(damped.astype(np.float32)), *udu, damping)
        assert damping < MAX_DAMPING, "no damping makes these moments positive"
        damping *= DAMPING_GROWTH
