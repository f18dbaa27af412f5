"""What the search does for each format: its groups, where it starts, how far it looks, and what a
value weighs.

It knows numbers that were tried out, no arithmetic of searching.

2026-11-22, importance alone or ggml's product with the value (`spread`), decided by the divergence
from a trained model: a Llama of hidden 512 (perplexity 73 on held-out text), every matrix of its
blocks in one type, 5080 positions, importance from 51,200 tokens of other text. Mean KL divergence
of ggml's search / importance alone / with the spread: Q2_K .00532 / .00667 / .00490, Q3_K .00153 /
.00167 / .00152, Q4_K .000351 / .000330 / .000314, Q4_0 .000433 / .000453 / .000432 (standard errors
1.5 to 3 %). Importance alone has the lower weighted error everywhere and lost. Above that they
cannot be told apart, the rounding of the activations outweighs them: Q5_K .000115 / .000115 /
.000116, Q6_K .000063 / .000064 / .000063, Q8_0 .000016 / .000015 / .000015; Q6_K and Q8_0 stay
without, as in ggml, the others with it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.native import F32, Importance

SLIGHT = 1e-6  # of a block's largest weight: what seems not to matter counts so much


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried: `starts`, each improved `rounds` times (scales.py), then looks `around`
    (superblocks.py).
    """

    starts: tuple[float, ...]
    rounds: int = 2
    around: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """A format's `values` of a block in `groups`; `whole` is the range of its whole-number scales,
    None without.

    `most` is what a minimum may be at most, None where there is none. `brief` is what numpy does,
    `long` what our C and a GPU do. With `spread` a value x weighs importance times sqrt(spread + x²
    / mean of x² in its block), nearly as in ggml, else by importance alone.
    """

    values: int
    groups: int
    whole: tuple[int, int] | None
    most: float | None
    brief: Effort
    long: Effort
    spread: float = 0.0

    def spread_with(self, importance: "Importance | None") -> float:
        """The spread; where nothing was measured large values weigh more in any case."""
        return self.spread if importance else self.spread or 1.0

    def even(self, vector: "F32") -> "F32":
        """The importance of columns, 1 at most in each block: [blocks of a row, values]."""
        import numpy as np

        blocks = vector.reshape(-1, self.values)
        largest = blocks.max(1, keepdims=True)
        shares = np.where(largest > 0, blocks, 1) / np.where(largest > 0, largest, 1)
        return np.maximum(shares, SLIGHT).astype(np.float32)

    def columns(self, importance: "Importance | None", rows: int, columns: int) -> "F32":
        """The same beside one another: [values of a group, groups of a block, rows, blocks of a
        row].
        """
        import numpy as np

        count, size = columns // self.values, self.values // self.groups
        weights = np.ones((size, self.groups, rows, count), np.float32)
        for first, last, vector in importance.spans(0, rows) if importance else ():
            turned = self.even(vector).reshape(count, self.groups, size).transpose(2, 1, 0)
            weights[:, :, first:last] = turned[:, :, None]
        return weights


def _even(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(low + (high - low) * step / (count - 1) for step in range(count))


def _both(low: float, high: float, count: int, turned: int) -> tuple[float, ...]:
    """Starts with the farthest value on the longer side of zero, and `turned` of them with it on
    the shorter.
    """
    return (*_even(low, high, count), *(-start for start in _even(low, high, turned)))


NEAR, NEXT, NONE = (-2, -1, 1, 2), (-1, 1), ()
FREE = 3e38  # a minimum of any size
GRIDS = {
    "Q2_K": Grid(
        256, 16, (0, 15), 0.0, spread=1.0,
        brief=Effort(_even(0.7, 1.3, 6), 2, (NEAR, NONE, NONE)),
        long=Effort(_even(0.6, 1.3, 13), 2, (NEAR, NEXT, NONE)),
    ),
    "Q3_K": Grid(
        256, 16, (-32, 31), None, spread=2.0,
        brief=Effort((0.8, 1.0, 1.2, -0.8, -1.0, -1.2), 1, (NEXT, NONE)),
        long=Effort(_both(0.7, 1.3, 9, 9), 1, (NEAR, NEXT, NONE)),
    ),
    "Q4_K": Grid(
        256, 8, (0, 63), 0.0, spread=2.0,
        brief=Effort(_even(0.94, 1.06, 6), 2, (NEAR, NONE, NONE)),
        long=Effort(_even(0.9, 1.1, 17), 2, (NEAR, NEXT, NONE)),
    ),
    "Q5_K": Grid(
        256, 8, (0, 63), 0.0, spread=2.0,
        brief=Effort(_even(0.97, 1.03, 6), 2, (NEAR, NONE, NONE)),
        long=Effort(_even(0.95, 1.05, 17), 2, (NEAR, NEXT, NONE)),
    ),
    "Q6_K": Grid(
        256, 16, (-128, 127), None,
        brief=Effort((0.97, 1.0, 1.03), 1, (NEAR, NONE)),
        long=Effort((*_even(0.95, 1.05, 9), -0.97, -1.0, -1.03), 1, (NEAR, NEXT, NONE)),
    ),
    "Q4_0": Grid(
        32, 1, None, None, spread=1.0,
        brief=Effort(_both(0.8, 1.1, 7, 2), 1), long=Effort(_both(0.8, 1.15, 15, 6), 1),
    ),
    "Q4_1": Grid(32, 1, None, FREE, spread=1.0, brief=Effort(_even(0.91, 1.09, 10)), long=Effort(_even(0.9, 1.1, 17))),
    "Q5_0": Grid(
        32, 1, None, None, spread=1.0,
        brief=Effort(_even(0.9, 1.05, 6), 1), long=Effort(_both(0.9, 1.05, 12, 4), 1),
    ),
    "Q5_1": Grid(
        32, 1, None, FREE, spread=1.0,
        brief=Effort(_even(0.955, 1.045, 12)), long=Effort(_even(0.95, 1.05, 17)),
    ),
    "Q8_0": Grid(32, 1, None, None, brief=Effort((0.995, 1.0, 1.005), 1), long=Effort(_even(0.95, 1.0, 6), 1)),
}  # fmt: skip
