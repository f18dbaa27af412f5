"""Factorization of second moments for error feedback: H = (I + F) D (I + F)^T, with F strictly
upper triangular and D diagonal.

A change dw of a row causes the error dw H dw^T in the layer's output. With this factorization the
error is a sum over columns: D_j times the square of column j's own error plus the errors of the
columns before it, each multiplied by its entry of F. Rounding one column after another so that this
sum becomes small is GPTQ (Frantar et al. 2210.17323). The form without the inverse of H is LDLQ
(Chee et al. 2307.13304, whose theorem 6 shows that both are the same). A Cholesky factorization of
H with reversed rows and columns gives F and D without an inverse.

H is damped: a tenth of its mean diagonal is added to the diagonal. With less damping the codes fit
the calibration text at the expense of other text. A tenth is the best compromise over roles, models
and texts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.native.array_backends import Array, ArrayBackend

if TYPE_CHECKING:
    from quant.native.ggml import F32

DAMPING = 0.1  # fraction of the mean diagonal that is added to the diagonal
DAMPING_GROWTH = 10.0  # factor by which the damping grows while a matrix cannot be factored
MAX_DAMPING = 1e4


@dataclass(frozen=True)
class HessianFactor:
    """The damped second moments H of one input and their factorization, as F32 arrays. `damping` is
    the fraction that was needed.
    """

    moments: Array  # H [columns, columns]
    # F transposed [columns, columns], strictly lower triangular: row j has the factors by which the
    # errors of the columns before j are added to column j
    feed: Array
    weights: Array  # D [columns]
    damping: float


def factor_moments(mean: "F32", ops: ArrayBackend, damping: float = DAMPING) -> HessianFactor:
    """Factor mean second moments [columns, columns], which must be finite and symmetric.

    H is singular if a channel has no input, or if the calibration had fewer tokens than columns.
    Then the damping is increased tenfold until the factorization succeeds. An H of zeros is
    replaced by the identity.
    """
    import numpy as np

    diagonal = mean.diagonal().astype(np.float64)
    scale = float(diagonal.mean())
    if not scale > 0:
        mean = np.eye(len(mean), dtype=np.float32)
        diagonal, scale = np.ones(len(mean)), 1.0
    while True:
        damped_diagonal = diagonal + damping * scale
        if (udu := ops.factor_udu(mean, damped_diagonal)) is not None:
            damped = mean.copy()
            np.fill_diagonal(damped, damped_diagonal)
            return HessianFactor(ops.array(damped), *udu, damping)
        assert damping < MAX_DAMPING, "no damping makes these moments positive"
        damping *= DAMPING_GROWTH
