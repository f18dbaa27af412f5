"""What second moments say to a method that feeds errors forward: H = (I + F) D (I + F)^T, F
strictly upper.

The error of a row in the layer's output is dw H dw^T. With this factor it is a sum over columns:
D_j times the square of what column j still lacks once the errors of the columns before it have been
fed into it through F. Rounding column after column against that target is GPTQ (Frantar et al.
2210.17323); written without the inverse of H it is LDLQ (Chee et al. 2307.13304, theorem 6: the two
are the same). One Cholesky factorisation of H read backwards gives F and D, nothing is inverted,
and no weight is written to before its turn.

2026-11-22: damping by 0.1 of the mean diagonal. Less follows the calibration's text where others
differ from it: KL divergence on three chunks of Wikipedia (which the calibration has, 12,288 tokens
with code) and three of plays (which it has not), every third layer of SmolLM2-135M at Q4_K_M's
types, one role at a time:

    damping            0.01               0.1                1           search's codes
    ffn_up, ffn_gate   .00314 .00319      .00281 .00277      .00288 .00270      .00382 .00309
    ffn_down           .00370 .00406      .00343 .00381      .00302 .00297      .00421 .00320
    attn_q, k, output                     .00136 .00109      .00143 .00122

Half the text gave .00284 and .00279 at 0.1 for ffn_up: more of it would not do instead. A Llama of
hidden 512, all of it, 10,240 tokens, eight chunks each: .000129 and .000187, .000116 and .000168,
.000135 and .000191. More for ffn_down alone helps the one and hurts the other: 0.3 gave SmolLM2's
.00325 and .00330, 0.5 the Llama .000119 and .000174. By the error of eight matrices under moments
of other text 0.01 and 0.1 are the same, 1 is a sixth worse. Weighing what is beside the diagonal
less did ffn_down as much good as damping: times 0.75 .00357 and .00329, 0.5 .00338 and .00311, 0.25
.00325 and .00298. Damping by a part of each column's own diagonal (0.003 to 0.1) made two of seven
matrices worse than with 0.01; weighing rows by how little they are of the residual behind them,
ffn_down (.00931 and .00833 for .00789 and .00812).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.accelerate import Array, Ops

if TYPE_CHECKING:
    from quant.native import F32

DAMPING = 0.1  # of the mean of the diagonal, added to it
STEP = 10.0  # by which damping grows where a matrix cannot be factored
MOST = 1e4


@dataclass(frozen=True)
class Factor:
    """H of one input, damped, and its factor; F32 arrays. `damping` is what it took."""

    moments: Array  # H [columns, columns]
    # F transposed [columns, columns], strictly lower: row j takes from the columns before j
    feed: Array
    weights: Array  # D [columns]
    damping: float


def factor(mean: "F32", ops: Ops, damping: float = DAMPING) -> Factor:
    """Factor mean moments [columns, columns]; they are finite and symmetric.

    A channel that never spoke, or less text than columns, leaves H without an inverse: damping
    makes one up, ten times more of it each time until the factorisation succeeds. Where H is zero
    altogether it becomes the identity.
    """
    import numpy as np

    damped = mean.astype(np.float64)
    plain = damped.diagonal().copy()
    scale = float(plain.mean())
    if not scale > 0:
        damped, plain, scale = np.eye(len(mean)), np.ones(len(mean)), 1.0
    while True:
        np.fill_diagonal(damped, plain + damping * scale)
        if (found := ops.udu(damped)) is not None:
            return Factor(ops.array(damped.astype(np.float32)), *found, damping)
        assert damping < MOST, "no damping makes these moments positive"
        damping *= STEP
