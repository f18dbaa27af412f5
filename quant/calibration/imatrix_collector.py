"""Collects an importance matrix while a model reads a text: for each weight, the sum of squares of
each column of its input, as in llama-imatrix.

Source: IMatrixCollector (tools/imatrix/imatrix.cpp), with two differences. Sums of up to 512 rows
are float32 and larger sums float64, while llama.cpp adds all rows in float32. A head that is tied
to the embedding is also measured, under the name of the embedding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quant.errors import UserError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
F32_ROWS = 512  # maximum number of rows whose squares are added in float32
DAMAGED_HINT = "the model file may be damaged: compare it with its source by `llmcli diff`"


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """One matrix product of an input with a weight, as llama.cpp computed it.

    `rows` is the input [.., rows, columns], with up to four dimensions. `matrices` are the sizes of
    the weight's third and fourth dimension; a weight with several matrices multiplies each with a
    different part of the rows. For a weight of experts, `experts` (int32 [tokens, used]) has the
    numbers of the experts that each token is routed to, and `rows` is [tokens, used or 1, columns];
    for other weights `experts` is None. Two products in succession with the same `key` have the
    same input rows.
    """

    name: str
    rows: F32
    matrices: tuple[int, int]
    experts: NDArray[np.int32] | None
    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionMixture:
    """The attention weights of one layer in one forward pass. `shares` [heads, queries, keys] is
    the share of each key's value in each query's output.

    `name` is llama.cpp's name of the product that mixes the values, such as "kqv-5".
    """

    name: str
    shares: F32


class ImatrixCollector:
    """Sums of squares of the input columns, and numbers of input rows, of every weight
    seen so far.
    """

    def __init__(self) -> None:
        self.sums: dict[str, F64] = {}  # by weight, [matrices, columns]
        self.counts: dict[str, F64] = {}  # rows by weight: [matrices] for experts, else [1]
        self._last: tuple[tuple[int, int], set[str], F64] | None = None

    def add(self, product: WeightProduct) -> None:
        """Add the input rows of one product to the sums of its weight."""
        if product.experts is None:
            self._add_dense(product)
        else:
            self._add_experts(product, product.experts)

    def add_shared(self, product: WeightProduct, names: Sequence[str]) -> None:
        """Add the input rows of `product` to the sums of all weights in `names`, which share this
        input. Several threads may call this at the same time if no name occurs in two calls.
        """
        if product.experts is None:
            squares = _squares(product)
            for name in names:
                self._add_squares(name, product, squares)
        else:
            for name in names:
                self._add_experts(replace(product, name=name), product.experts)

    def _add_dense(self, product: WeightProduct) -> None:
        # A pass contains each weight once, so a repeated name means a new pass, which may use the
        # same key for other rows.
        if self._last is None or self._last[0] != product.key or product.name in self._last[1]:
            self._last = product.key, set(), _squares(product)
        self._last[1].add(product.name)
        self._add_squares(product.name, product, self._last[2])

    def _add_squares(self, name: str, product: WeightProduct, squares: F64) -> None:
        """Add the sums of squares [i3, i2, columns] of a product's input to the weight `name`, and
        count its rows. The axes i3 and i2 are the input's outer dimensions, from which the matrix
        follows.
        """
        inner, outer = product.matrices
        sums = self.sums.setdefault(name, np.zeros((inner * outer, squares.shape[-1])))
        for i3, i2 in np.ndindex(squares.shape[:2]):
            sums[(i3 % outer) * inner + i2 % inner] += squares[i3, i2]
        counts = self.counts.setdefault(name, np.zeros(1))
        counts += product.rows[..., 0].size // (inner * outer)

    def _add_experts(self, product: WeightProduct, experts: NDArray[np.int32]) -> None:
        rows, count = product.rows, product.matrices[0]
        sums = self.sums.setdefault(product.name, np.zeros((count, rows.shape[-1])))
        counts = self.counts.setdefault(product.name, np.zeros(count))
        for expert in np.unique(experts):
            tokens, slots = np.nonzero(experts == expert)
            routed = rows[tokens, slots % rows.shape[1]]
            sums[expert] += _require_finite(
                (routed * routed).sum(0, dtype=np.float64), product.name
            )
            counts[expert] += len(tokens)

    def keep_only(self, names: Iterable[str]) -> None:
        """Drop the sums of all weights except `names`."""
        retained = set(names)
        self.sums = {name: sums for name, sums in self.sums.items() if name in retained}
        self.counts = {name: counts for name, counts in self.counts.items() if name in retained}

    def unseen_experts(self) -> dict[str, int]:
        """Return how many experts of each weight received no token. Only weights with at least one
        such expert are in the result.
        """
        return {
            name: int((counts == 0).sum())
            for name, counts in self.counts.items()
            if (counts == 0).any()
        }

    def dead_columns(self) -> dict[str, int]:
        """Return how many input columns of each weight were always zero, not counting experts
        without tokens. Only weights with at least one such column are in the result.
        """
        columns = {}
        for name, sums in self.sums.items():
            has_tokens = np.broadcast_to(self.counts[name] > 0, len(sums))
            if count := int((sums[has_tokens] == 0).sum()):
                columns[name] = count
        return columns


def _squares(product: WeightProduct) -> F64:
    """Return the sums of squares [i3, i2, columns] over the rows of an input. Blocks of F32_ROWS
    rows are added in float32, and the sums of the blocks in float64.
    """
    blocks = (
        product.rows[:, :, first : first + F32_ROWS]
        for first in range(0, product.rows.shape[2], F32_ROWS)
    )
    squares = sum(
        (np.einsum("abij,abij->abj", rows, rows).astype(np.float64) for rows in blocks), np.zeros(1)
    )
    return _require_finite(squares, product.name)


def _require_finite(squares: F64, name: str) -> F64:
    """Return `squares` unchanged. Raises UserError if a value is not finite, so that a calibration
    of a damaged model fails early.
    """
    if not np.isfinite(squares).all():
        raise UserError(f"the input of {name} is not finite", hint=DAMAGED_HINT)
    return squares
