"""Folds and their effect on tensors. A site is a set of channels between tensors whose factors or
order may be changed without changing the model's function. A fold is one choice of factors and
order for a site.

The factor s_j of channel j multiplies the column j of the tensors that read the channel, and
divides the row j of the tensors that write it. A new order moves the channels of readers and
writers in the same way.
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
    """The rows or columns of one tensor that belong to a site. `channels` gives the channel of each
    row [rows], or of each column [matrices or 1, columns].

    A row or column of channel -1 does not belong to the site. `power` says what a channel's factor
    does to its rows or columns: 1 multiplies, -1 divides, 0 means no effect.
    """

    name: str
    axis: str  # "rows" or "columns"
    power: int
    channels: "Ints" = field(repr=False)


@dataclass(frozen=True)
class FoldSite:
    """A set of `width` channels between tensors. Their factors are free if `has_free_factors`;
    their order is free within runs of `group_size` channels, and fixed if `group_size` is 0.

    In every tensor the channels of a run are adjacent and in order, so that moving a channel moves
    its row or column by the same distance.
    """

    name: str  # "blk.3.attn_norm"
    kind: str  # "norm", "hidden", "value", "head", "residual"
    width: int
    group_size: int
    has_free_factors: bool
    tensors: tuple[FoldedTensor, ...] = field(repr=False)


@dataclass(frozen=True)
class Fold:
    """New factors [width] and a new order [width] for the channels of a site: channel order[i]
    moves to position i.

    Factors are in the old order. None means that the factors, or the order, stay unchanged. The
    constructor asserts that the site allows both.
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
    """The combined effect of folds on one tensor: its rows and columns are multiplied by factors
    [rows] and [matrices or 1, columns], then reordered. None means no change.

    Factors are in the old order. The tensor's input is divided by the column factors and then
    reordered like the columns.
    """

    row_factors: "F32 | None" = None
    column_factors: "F32 | None" = None
    row_order: "Ints | None" = None
    column_order: "Ints | None" = None

    def matrix_factors(self, matrix: int) -> "F32 | None":
        """Return the column factors [columns] of one matrix of the tensor (an expert), or None if
        there are none.
        """
        if self.column_factors is None:
            return None
        factors: F32 = self.column_factors[matrix if len(self.column_factors) > 1 else 0]
        return factors

    def matrix_order(self, matrix: int) -> "Ints | None":
        """Return the column order [columns] of one matrix of the tensor (an expert), or None if the
        order stays.
        """
        if self.column_order is None:
            return None
        order: Ints = self.column_order[matrix if len(self.column_order) > 1 else 0]
        return order

    @property
    def has_effect(self) -> bool:
        """Whether this edit changes the tensor at all."""
        return any(
            change is not None
            for change in (self.row_factors, self.column_factors, self.row_order, self.column_order)
        )

    def fold_mean_squares(self, means: "F32", matrix: int = 0) -> "F32":
        """Return the mean squares [columns] of a matrix's input after the folds, given those before
        (`means` [columns]).
        """
        import numpy as np

        factors: Any = self.matrix_factors(matrix)
        order = self.matrix_order(matrix)
        new: F32 = means if factors is None else means / np.square(factors)
        return new if order is None else new[order]

    def fold_moments(self, moments: "F32", matrix: int = 0) -> "F32":
        """Return the second moments [columns, columns] of a matrix's input after the folds, given H
        before: S^-1 H S^-1, with rows and columns reordered like the input.
        """
        factors, order = self.matrix_factors(matrix), self.matrix_order(matrix)
        new = moments
        if factors is not None:
            new = moments / factors[:, None] / factors[None, :]
        return new if order is None else new[order][:, order]


def combine_folds(folds: Iterable[Fold]) -> dict[str, TensorEdit]:
    """Return the combined effect of folds on each tensor that they change, by tensor name. Two
    folds must not move the same rows or columns of a tensor.
    """
    edits: dict[str, TensorEdit] = {}
    for fold in folds:
        for tensor in fold.site.tensors:
            edit = edits.setdefault(tensor.name, TensorEdit())
            if fold.factors is not None and tensor.power:
                _multiply_factors(edit, tensor, fold.factors)
            if fold.order is not None:
                _append_order(edit, tensor, fold.order)
    return {name: edit for name, edit in edits.items() if edit.has_effect}


def _multiply_factors(edit: TensorEdit, tensor: FoldedTensor, channel_factors: "F32") -> None:
    """Multiply an edit's factors by a fold's factors [width], each raised to `tensor.power`."""
    import numpy as np

    powers = channel_factors.astype(np.float64) ** tensor.power
    factors = np.where(tensor.channels >= 0, powers[tensor.channels], 1.0)
    field = {"rows": "row_factors", "columns": "column_factors"}[tensor.axis]
    old = getattr(edit, field)
    setattr(edit, field, (factors if old is None else old * factors).astype(np.float32))


def _append_order(edit: TensorEdit, tensor: FoldedTensor, order: "Ints") -> None:
    """Add a fold's order [width] of channels to an edit's order of rows or columns."""
    import numpy as np

    field = {"rows": "row_order", "columns": "column_order"}[tensor.axis]
    shifts = np.where(tensor.channels >= 0, order[tensor.channels] - tensor.channels, 0)
    positions = np.broadcast_to(np.arange(tensor.channels.shape[-1]), tensor.channels.shape)
    old = getattr(edit, field)
    if old is not None:
        # a tensor with both gate and up is reordered twice, but its halves do not overlap
        assert old.shape == shifts.shape and not ((old != positions) & (shifts != 0)).any(), (
            tensor.name,
            field,
        )
        positions = old
    setattr(edit, field, positions + shifts)


def digest_folds(folds: Sequence[Fold], before: str = "") -> str:
    """Return a digest of folds as 32 hex digits, which does not depend on their order.

    `before` is the digest of folds that the model already has, "" for none. It is part of the new
    digest, and is returned unchanged if `folds` is empty.
    """
    if not folds:
        return before
    digest = hashlib.sha256(before.encode())
    for fold in sorted(folds, key=lambda fold: fold.site.name):
        digest.update(
            f"{fold.site.name} {fold.factors is not None} {fold.order is not None}\0".encode()
        )
        if fold.factors is not None:
            digest.update(fold.factors.astype("<f4").tobytes())
        if fold.order is not None:
            digest.update(fold.order.astype("<i8").tobytes())
    return digest.hexdigest()[:32]
