"""What enters each weight while a model reads a text: sums of squares per input column, as
llama-imatrix takes them.

Follows IMatrixCollector (tools/imatrix/imatrix.cpp), but for two things: sums are float64 above 512
rows (upstream adds all rows up in float32), and a tied head counts too, under the name of the
embedding that it is. It knows names and rows; what runs the model is passed in.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quant import writer
from quant.errors import Refusal
from quant.imatrix import CHUNK_SIZE, CHUNKS, COUNTS, DATASETS, MODEL, SUMS, TRANSFORM
from quant.soundness import IMATRIX

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
ALIGNMENT = 32
ROWS = 512  # squares of so many are added up in float32
DAMAGED = "the model's file may be damaged: llmcli diff it against its source"


@dataclass(frozen=True, slots=True)
class Product:
    """One product with a weight, as it was computed: `rows` is what entered, [.., rows, columns] of
    up to four dimensions; a weight of several `matrices` takes them in turn. With `experts`, int32
    [tokens, used], `rows` are [tokens, used or 1, columns]. `key` is the same where the same rows
    enter another weight right after.
    """

    name: str
    rows: F32
    matrices: tuple[int, int]
    experts: NDArray[np.int32] | None
    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How attention mixed the values of one layer in a pass: each key's share [heads, queries,
    keys] in what each query gets. `name` is llama.cpp's for that product, as "kqv-5".
    """

    name: str
    shares: F32


class Sums:
    """Sums of squares and how often they were added to, for every weight seen so far."""

    def __init__(self) -> None:
        self.sums: dict[str, F64] = {}  # [matrices, columns]
        self.counts: dict[str, F64] = {}  # [matrices] for experts, else [1]
        self._last: tuple[tuple[int, int], set[str], F64] | None = None

    def add(self, product: Product) -> None:
        """Count one product in."""
        if product.experts is None:
            self._dense(product)
        else:
            self._experts(product, product.experts)

    def share(self, product: Product, names: Sequence[str]) -> None:
        """Count in rows that enter all weights of these `names`. Several threads may do so, each
        for other weights.
        """
        if product.experts is None:
            squares = _squares(product)
            for name in names:
                self._count(name, product, squares)
        else:
            for name in names:
                self._experts(replace(product, name=name), product.experts)

    def _dense(self, product: Product) -> None:
        # The next pass may show other rows under the same key: a name comes once in a pass.
        if self._last is None or self._last[0] != product.key or product.name in self._last[1]:
            self._last = product.key, set(), _squares(product)
        self._last[1].add(product.name)
        self._count(product.name, product, self._last[2])

    def _count(self, name: str, product: Product, squares: F64) -> None:
        """Add the `squares` [i3, i2, columns] of what entered."""
        inner, outer = product.matrices
        sums = self.sums.setdefault(name, np.zeros((inner * outer, squares.shape[-1])))
        for i3, i2 in np.ndindex(squares.shape[:2]):
            sums[(i3 % outer) * inner + i2 % inner] += squares[i3, i2]
        counts = self.counts.setdefault(name, np.zeros(1))
        counts += product.rows[..., 0].size // (inner * outer)

    def _experts(self, product: Product, experts: NDArray[np.int32]) -> None:
        rows, count = product.rows, product.matrices[0]
        sums = self.sums.setdefault(product.name, np.zeros((count, rows.shape[-1])))
        counts = self.counts.setdefault(product.name, np.zeros(count))
        for expert in np.unique(experts):
            tokens, slots = np.nonzero(experts == expert)
            taken = rows[tokens, slots % rows.shape[1]]
            sums[expert] += _finite((taken * taken).sum(0, dtype=np.float64), product.name)
            counts[expert] += len(tokens)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all weights but these."""
        kept = set(names)
        self.sums = {name: sums for name, sums in self.sums.items() if name in kept}
        self.counts = {name: counts for name, counts in self.counts.items() if name in kept}

    def unseen(self) -> dict[str, int]:
        """Weights of experts, and how many of each no token went to."""
        return {
            name: int((counts == 0).sum())
            for name, counts in self.counts.items()
            if (counts == 0).any()
        }

    def dead(self) -> dict[str, int]:
        """Weights with columns that nothing ever entered, and how many; of experts, those that were
        seen.
        """
        found = {}
        for name, sums in self.sums.items():
            seen = np.broadcast_to(self.counts[name] > 0, len(sums))
            if count := int((sums[seen] == 0).sum()):
                found[name] = count
        return found

    def file(
        self,
        datasets: Sequence[str],
        chunks: int,
        chunk_size: int,
        model: str = "",
        transform: str | None = None,
    ) -> list[bytes]:
        """The pieces of an imatrix as llama-imatrix writes it; `model` and `transform` are told
        beside that.
        """
        if not self.sums:
            raise Refusal(
                "the model multiplied by no weight that has a name", hint="is it a language model?"
            )
        entries = [
            ("general.type", writer.entry("string", IMATRIX)),
            (DATASETS, writer.entry("array:string", list(datasets))),
            (CHUNKS, writer.entry("uint32", chunks)),
            (CHUNK_SIZE, writer.entry("uint32", chunk_size)),
        ]
        own = {MODEL: model or None, TRANSFORM: transform}
        entries += [
            (key, writer.entry("string", told)) for key, told in own.items() if told is not None
        ]
        arrays: list[tuple[str, F64]] = []
        for name in sorted(self.sums):
            counts = self.counts[name]
            arrays += [
                (name + SUMS, self.sums[name].reshape(len(counts), -1)),
                (name + COUNTS, counts[:, None]),
            ]
        laid = writer.layout(
            entries, [(name, values.shape[::-1], "F32") for name, values in arrays], ALIGNMENT
        )
        pieces, at = [laid.header], len(laid.header)
        for slot, (_, values) in zip(laid.slots, arrays, strict=True):
            raw = values.astype("<f4").tobytes()
            pieces += [bytes(slot.offset - at), raw]
            at = slot.offset + len(raw)
        return [*pieces, bytes(laid.nbytes - at)]


def _squares(product: Product) -> F64:
    """Sums of squares of what entered [i3, i2, columns], float64 above some rows."""
    parts = (
        product.rows[:, :, first : first + ROWS] for first in range(0, product.rows.shape[2], ROWS)
    )
    made = sum(
        (np.einsum("abij,abij->abj", rows, rows).astype(np.float64) for rows in parts), np.zeros(1)
    )
    return _finite(made, product.name)


def _finite(squares: F64, name: str) -> F64:
    """Refused at once: hours later it would be as wrong."""
    if not np.isfinite(squares).all():
        raise Refusal(f"what enters {name} is not finite", hint=DAMAGED)
    return squares
