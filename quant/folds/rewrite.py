"""A source whose tensors are folded while their rows are read: names, shapes, order and metadata
stay.

A tensor that a fold changes is read as F32, whatever it is stored as; memory stays that of the rows
asked for. It knows sources and edits, not what they are for.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quant import native
from quant.folds.fold import Edit, Fold, digest, edits
from quant.folds.wiring import sites
from quant.source import Source, Weight
from quant.writer import entry

if TYPE_CHECKING:
    from quant.folds.fold import Ints
    from quant.native import U8

FOLD_KEY = "llmcli.quantize.fold"
ROOM = 512  # bytes of a header that tell of folds, more than they are
OTHERS = "folded: LoRA adapters, control vectors and projectors made for the original do not fit the new file"
SPREAD = 1.1  # of random factors, either way
NEAR = 4  # rows that are read in vain rather than by another read


def apply(source: Source, folds: Sequence[Fold], how: str = "") -> Source:
    """The same model with other weights: `fold` tells which, the fingerprint stays that of
    `source`.

    The file made of it says under FOLD_KEY that it is folded, and `how`.
    """
    changes = edits(folds)
    if not changes:
        return source
    told = json.dumps({"digest": digest(folds, source.fold), "how": how}, sort_keys=True)
    entries = [(key, value) for key, value in source.entries if key != FOLD_KEY]
    weights = tuple(
        replace(
            weight,
            type="F32",
            stored=weight.stored or weight.type,
            read=partial(_read, weight, edit),
        )
        if (edit := changes.get(weight.name))
        else weight
        for weight in source.weights
    )
    return replace(
        source,
        weights=weights,
        entries=(*entries, (FOLD_KEY, entry("string", told))),
        notes=(*source.notes, OTHERS),
        blobs=(),
        origin=source.origin or source,
        fold=digest(folds, source.fold),
        folded=how,
    )


def shaken(source: Source, seed: int, spread: float = SPREAD) -> tuple[Fold, ...]:
    """Random factors in [1 / spread, spread] for every free channel, and random orders wherever one
    is free.

    No block of a tensor then lies on the grid of a block it was once quantized in: its columns come
    from several blocks, those of a tied embedding too, and have factors of their own.

    2026-11-22: factors in [0.5, 2] alone were to do this. They make columns differ as no training
    does. SmolLM2-135M's attn_q, once Q4_1, then has a relative error of 9.0 % in Q4_1 where the
    same weights dithered by half a step have 8.06 %; orders and factors within a tenth give 8.10 %,
    orders alone 8.04 %, its own lattice 0. And folds gain by undoing such factors: awq leaves 48 %
    of the weighted error of q, k, v, gate and up at Q4_K_M, 73 % without them.
    """
    import numpy as np

    random, found = np.random.default_rng(seed), []
    for site in sites(source):
        logs = random.uniform(-1, 1, site.width) * np.log(spread)
        runs = range(0, site.width, site.group) if site.group else ()
        order = (
            np.concatenate([at + random.permutation(site.group) for at in runs]) if runs else None
        )
        found.append(Fold(site, np.exp(logs).astype(np.float32) if site.scales else None, order))
    return tuple(found)


def _read(weight: Weight, edit: Edit, first: int, last: int) -> "U8":
    """Rows first .. last of the folded tensor, as bytes of F32."""
    import numpy as np

    rows = np.arange(first, last)
    if edit.row_order is not None:
        rows = edit.row_order[first:last]
    stored = weight.read(first, last) if edit.row_order is None else gathered(weight.read, rows)
    values = native.decode(stored, weight.type, weight.columns, label=weight.name)
    if edit.columns is not None:
        values = values * _lines(edit.columns, rows, weight)
    if edit.rows is not None:
        values = values * edit.rows[rows, None]
    if edit.column_order is not None:
        order = _lines(edit.column_order, rows, weight)
        values = values[:, order[0]] if len(order) == 1 else np.take_along_axis(values, order, 1)
    return np.ascontiguousarray(values, np.float32).view(np.uint8)


def _lines(vectors: Any, rows: "Ints", weight: Weight) -> Any:
    """The vectors that belong to rows: one for all of them where they share it."""
    matrices = rows // (weight.rows // len(vectors))
    return vectors[matrices[:1]] if (matrices == matrices[0]).all() else vectors[matrices]


def gathered(read: "Callable[[int, int], U8]", rows: "Ints") -> "U8":
    """Rows in any order; those that lie side by side, or nearly, are read at once."""
    import numpy as np

    wanted = np.unique(rows)
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > NEAR) + 1)
    pieces = [read(int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs]
    return np.concatenate(pieces)[np.searchsorted(wanted, rows)]
