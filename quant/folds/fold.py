"""Folds. A site is a set of channels between tensors, whose factors or order are free; a fold is a
choice of them, with its effect on each tensor.

The factor s_j of a channel multiplies the tensors that read the channel and divides the tensors
that write it. A permutation moves the channels of readers and writers alike.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32

    F64 = NDArray[np.float64]
    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FoldedTensor:
    """The part of a tensor that belongs to a site: the channel of each of its rows [rows], or of
    each of its columns [matrices or 1, columns].

    A row or column of channel -1 does not belong to the site. `power` says what the channel's
    factor does: 1 multiplies, -1 divides, 0 means no effect.
    """

    name: str
    axis: str  # "rows" or "columns"
    power: int
    channels: "Ints" = field(repr=False)


@dataclass(frozen=True)
class FoldSite:
    """`width` channels between tensors whose order is free, and whose factors are free, too, with
    `has_free_factors`.

    Channels may be permuted within runs of `group_size`; 0 means that no permutation is allowed. In
    every tensor the channels of a run are adjacent and in order, so that moving a channel moves its
    row or column by the same distance.
    """

    name: str  # "blk.3.attn_norm"
    kind: str  # "norm", "hidden", "value", "head", "residual"
    width: int
    group_size: int
    has_free_factors: bool
    tensors: tuple[FoldedTensor, ...] = field(repr=False)


@dataclass(frozen=True)
class Fold:
    """Factors [width] of a site's channels, and a new order [width] of them: channel order[i] moves
    to position i.

    Factors are in the old order. None means that the factors, or the order, stay unchanged.
    """

    site: FoldSite
    factors: "F32 | None" = None
    order: "Ints | None" = None

    def __post_init__(self) -> None:
        import numpy as np

        width, group = self.site.width, self.site.group_size
        if self.factors is not None:
            valid = bool(np.isfinite(self.factors).all() and (self.factors > 0).all())
            assert self.site.has_free_factors and self.factors.shape == (width,) and valid, (
                self.site.name
            )
        if self.order is not None:
            runs = np.arange(width) // max(group, 1)
            valid = bool(group and (np.sort(self.order) == np.arange(width)).all())
            assert valid and (runs[self.order] == runs).all(), self.site.name


@dataclass
class TensorEdit:
    """The combined effect of folds on one tensor: factors of rows [rows] and of columns [matrices
    or 1, columns], then new orders of rows and columns.

    Factors are in the old order. The tensor's input is divided by the column factors and then
    reordered like the columns.
    """

    row_factors: "F32 | None" = None
    column_factors: "F32 | None" = None
    row_order: "Ints | None" = None
    column_order: "Ints | None" = None

    def matrix_factors(self, matrix: int) -> "F32 | None":
        """Return the factors [columns] of the columns of a matrix, or None for no factors."""
        if self.column_factors is None:
            return None
        factors: F32 = self.column_factors[matrix if len(self.column_factors) > 1 else 0]
        return factors

    def matrix_order(self, matrix: int) -> "Ints | None":
        """Return the order [columns] of the columns of a matrix, or None for the old order."""
        if self.column_order is None:
            return None
        order: Ints = self.column_order[matrix if len(self.column_order) > 1 else 0]
        return order

    @property
    def has_effect(self) -> bool:
        """Whether the folds change the tensor."""
        return any(
            part is not None
            for part in (self.row_factors, self.column_factors, self.row_order, self.column_order)
        )

    def fold_mean_squares(self, means: "F32", matrix: int = 0) -> "F32":
        """Return the mean squares [columns] of a matrix's input after the folds."""
        import numpy as np

        factors: Any = self.matrix_factors(matrix)
        order = self.matrix_order(matrix)
        new: F32 = means if factors is None else means / np.square(factors)
        return new if order is None else new[order]

    def fold_moments(self, moments: "F32", matrix: int = 0) -> "F32":
        """Return the second moments [columns, columns] of a matrix's input after the folds: S^-1 H
        S^-1, with rows and columns reordered like the input.
        """
        factors, order = self.matrix_factors(matrix), self.matrix_order(matrix)
        new = moments
        if factors is not None:
            new = moments / factors[:, None] / factors[None, :]
        return new if order is None else new[order][:, order]


def combine_folds(folds: Iterable[Fold]) -> dict[str, TensorEdit]:
    """Return the combined effect of folds on each tensor that they change. At most one fold may
    reorder an axis of a tensor.
    """
    changes: dict[str, TensorEdit] = {}
    for fold in folds:
        for part in fold.site.tensors:
            edit = changes.setdefault(part.name, TensorEdit())
            if fold.factors is not None and part.power:
                _scale(edit, part, fold.factors)
            if fold.order is not None:
                _order(edit, part, fold.order)
    return {name: edit for name, edit in changes.items() if edit.has_effect}


def _scale(edit: TensorEdit, part: FoldedTensor, scale: "F32") -> None:
    import numpy as np

    wide = scale.astype(np.float64) ** part.power
    factors = np.where(part.channels >= 0, wide[part.channels], 1.0)
    field = {"rows": "row_factors", "columns": "column_factors"}[part.axis]
    old = getattr(edit, field)
    setattr(edit, field, (factors if old is None else old * factors).astype(np.float32))


def _order(edit: TensorEdit, part: FoldedTensor, order: "Ints") -> None:
    import numpy as np

    field = {"rows": "row_order", "columns": "column_order"}[part.axis]
    moved = np.where(part.channels >= 0, order[part.channels] - part.channels, 0)
    positions = np.broadcast_to(np.arange(part.channels.shape[-1]), part.channels.shape)
    old = getattr(edit, field)
    if old is not None:
        # a tensor with both gate and up is reordered twice, but its halves do not overlap
        assert old.shape == moved.shape and not ((old != positions) & (moved != 0)).any(), (
            part.name,
            field,
        )
        positions = old
    setattr(edit, field, positions + moved)


def digest_folds(folds: Sequence[Fold], before: str = "") -> str:
    """Return a digest of the folds that does not depend on their order.

    `before` is the digest of folds that the model already has; it is returned unchanged if there
    are no new folds.
    """
    if not folds:
        return before
    total = hashlib.sha256(before.encode())
    for fold in sorted(folds, key=lambda fold: fold.site.name):
        total.update(
            f"{fold.site.name} {fold.factors is not None} {fold.order is not None}\0".encode()
        )
        if fold.factors is not None:
            total.update(fold.factors.astype("<f4").tobytes())
        if fold.order is not None:
            total.update(fold.order.astype("<i8").tobytes())
    return total.hexdigest()[:32]
