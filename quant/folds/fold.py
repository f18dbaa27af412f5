"""What a fold is: channels between tensors of which a factor, or the order, is free; and what it
does to each tensor.

The factor s_j of a channel multiplies what reads it and divides what writes it; a permutation moves
both alike. It knows names and numbers: which channels there are is wiring's, reading and writing is
rewrite's.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native import F32

    F64 = NDArray[np.float64]
    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """A tensor's share in a site: the channel of each of its rows [rows], or of its columns
    [matrices or 1, columns].

    Channel -1 is none of this site's. `power` is what becomes of a factor: 1 multiplies, -1
    divides, 0 leaves be.
    """

    name: str
    axis: str  # "rows" or "columns"
    power: int
    channels: "Ints" = field(repr=False)


@dataclass(frozen=True)
class Site:
    """`width` channels between tensors, whose factors (`scales`) or order are free.

    Channels may change places within runs of `group`; 0 where none may. In every part the channels
    of a run stand side by side in their order, so that what moves a channel moves a row or column
    as far.
    """

    name: str  # "blk.3.attn_norm"
    kind: str  # "norm", "hidden", "value", "head", "residual"
    width: int
    group: int
    scales: bool
    parts: tuple[Part, ...] = field(repr=False)


@dataclass(frozen=True)
class Fold:
    """Factors [width] of a site's channels, and their new order [width]: channel i becomes what
    order[i] was.

    Factors count in the old order. None leaves factors, or the order, as they are.
    """

    site: Site
    scale: "F32 | None" = None
    order: "Ints | None" = None

    def __post_init__(self) -> None:
        import numpy as np

        width, group = self.site.width, self.site.group
        if self.scale is not None:
            sound = bool(np.isfinite(self.scale).all() and (self.scale > 0).all())
            assert self.site.scales and self.scale.shape == (width,) and sound, self.site.name
        if self.order is not None:
            runs = np.arange(width) // max(group, 1)
            sound = bool(group and (np.sort(self.order) == np.arange(width)).all())
            assert sound and (runs[self.order] == runs).all(), self.site.name


@dataclass
class Edit:
    """All that folds do to one tensor: factors of rows [rows] and of columns [matrices or 1,
    columns], then new orders.

    Factors count in the old order. What enters the tensor is divided by the columns' factors and
    ordered alike.
    """

    rows: "F32 | None" = None
    columns: "F32 | None" = None
    row_order: "Ints | None" = None
    column_order: "Ints | None" = None

    @property
    def any(self) -> bool:
        """Whether the tensor changes at all."""
        return any(
            part is not None
            for part in (self.rows, self.columns, self.row_order, self.column_order)
        )

    def squares(self, means: "F32", matrix: int = 0) -> "F32":
        """Mean squares [columns] of what enters a matrix, after the folds."""
        import numpy as np

        new: F32 = means if self.columns is None else means / np.square(_of(self.columns, matrix))
        return new if self.column_order is None else new[_of(self.column_order, matrix)]

    def second(self, moments: "F32", matrix: int = 0) -> "F32":
        """Second moments [columns, columns] of what enters a matrix, after the folds: S^-1 H S^-1,
        ordered alike.
        """
        new = moments
        if self.columns is not None:
            factors = _of(self.columns, matrix)
            new = moments / factors[:, None] / factors[None, :]
        if self.column_order is not None:
            order = _of(self.column_order, matrix)
            new = new[order][:, order]
        return new


def _of(vectors: Any, matrix: int) -> Any:
    return vectors[matrix if len(vectors) > 1 else 0]


def edits(folds: Iterable[Fold]) -> dict[str, Edit]:
    """What folds do together, tensor by tensor; two orders of the same axis are a bug."""
    found: dict[str, Edit] = {}
    for fold in folds:
        for part in fold.site.parts:
            edit = found.setdefault(part.name, Edit())
            if fold.scale is not None and part.power:
                _scale(edit, part, fold.scale)
            if fold.order is not None:
                _order(edit, part, fold.order)
    return {name: edit for name, edit in found.items() if edit.any}


def _scale(edit: Edit, part: Part, scale: "F32") -> None:
    import numpy as np

    wide = scale.astype(np.float64) ** part.power
    factors = np.where(part.channels >= 0, wide[part.channels], 1.0)
    old = getattr(edit, part.axis)
    setattr(edit, part.axis, (factors if old is None else old * factors).astype(np.float32))


def _order(edit: Edit, part: Part, order: "Ints") -> None:
    import numpy as np

    name = {"rows": "row_order", "columns": "column_order"}[part.axis]
    moved = np.where(part.channels >= 0, order[part.channels] - part.channels, 0)
    places = np.broadcast_to(np.arange(part.channels.shape[-1]), part.channels.shape)
    if (
        old := getattr(edit, name)
    ) is not None:  # gate and up in one tensor: halves that do not touch
        assert old.shape == moved.shape and not ((old != places) & (moved != 0)).any(), (
            part.name,
            name,
        )
        places = old
    setattr(edit, name, places + moved)


def digest(folds: Sequence[Fold], before: str = "") -> str:
    """Tells folds apart, whatever order they are in, and those that were made `before`; "" where
    there are none.
    """
    if not folds:
        return before
    total = hashlib.sha256(before.encode())
    for fold in sorted(folds, key=lambda fold: fold.site.name):
        total.update(
            f"{fold.site.name} {fold.scale is not None} {fold.order is not None}\0".encode()
        )
        if fold.scale is not None:
            total.update(fold.scale.astype("<f4").tobytes())
        if fold.order is not None:
            total.update(fold.order.astype("<i8").tobytes())
    return total.hexdigest()[:32]
