"""What the search does for each format: its groups, where it starts, how far it looks, and what a value weighs.

It knows numbers that were tried out, no arithmetic of searching.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.native import F32, Importance

SLIGHT = 1e-6  # of a block's largest weight: what seems not to matter counts so much


@dataclass(frozen=True, slots=True)
class Grid:
    """A format's `values` of a block in `groups`; `whole` is the range of its whole-number scales, None without.

    `most` is what a minimum may be at most, None where there is none. `starts` and `rounds` are those of scales.py,
    `around` is a look of superblocks.py after another. With `spread` a value x weighs importance times
    sqrt(spread * mean of x² + x²), as in ggml, else by importance alone; the mean is a superblock's, or a row's.
    """

    values: int
    groups: int
    whole: tuple[int, int] | None
    most: float | None
    starts: tuple[float, ...]
    rounds: int = 2
    around: tuple[tuple[int, ...], ...] = ()
    spread: float = 0.0

    def weights(self, rows: "F32", importance: "Importance | None") -> "F32":
        """What each value of rows [rows, columns] weighs, 1 at most in each block."""
        import numpy as np

        weights = np.ones_like(rows)
        if self.spread or importance is None:
            parts = rows.reshape(len(rows), -1, self.values if self.whole else rows.shape[1])
            mean = np.einsum("rbv,rbv->rb", parts, parts)[..., None] * np.float32((self.spread or 1) / parts.shape[2])
            np.sqrt(parts * parts + mean, out=weights.reshape(parts.shape))
        for first, last, vector in importance.spans(0, len(rows)) if importance else ():
            weights[first:last] *= vector
        blocks = weights.reshape(-1, self.values)
        largest = blocks.max(1, keepdims=True)
        blocks *= np.where(largest > 0, 1, 0) / np.where(largest > 0, largest, 1)
        return np.maximum(weights, SLIGHT, out=weights)


NEAR = (-2, -1, 1, 2)
GRIDS = {
    "Q2_K": Grid(256, 16, (0, 15), 0.0, (0.7, 0.82, 0.94, 1.06, 1.18, 1.3), around=(NEAR, (), ())),
    "Q3_K": Grid(256, 16, (-32, 31), None, (0.8, 1.0, 1.2, -0.8, -1.0, -1.2), around=(NEAR, (), ())),
    "Q4_K": Grid(256, 8, (0, 63), 0.0, (0.94, 0.964, 0.988, 1.012, 1.036, 1.06), around=(NEAR, (), ())),
    "Q5_K": Grid(256, 8, (0, 63), 0.0, (0.97, 0.982, 0.994, 1.006, 1.018, 1.03), around=(NEAR, (), ())),
    "Q6_K": Grid(256, 16, (-128, 127), None, (0.97, 1.0, 1.03), around=(NEAR, (), ())),
    "Q4_0": Grid(32, 1, None, None, (0.8, 0.9, 1.0, 1.1, -0.9, -1.0)),
    "Q4_1": Grid(32, 1, None, 3e38, (0.94, 0.964, 0.988, 1.012, 1.036, 1.06)),
    "Q5_0": Grid(32, 1, None, None, (0.9, 0.95, 1.0, 1.05, -0.95, -1.0)),
    "Q5_1": Grid(32, 1, None, 3e38, (0.97, 0.982, 0.994, 1.006, 1.018, 1.03)),
    "Q8_0": Grid(32, 1, None, None, (1.0, 1.1, 1.2, 1.3)),
}
