"""A source whose tensors are folded while their rows are read. Names, shapes, order and metadata
stay the same; one key (FOLD_KEY) is added that records the folds.

A tensor that a fold changes becomes F32, whatever type it is stored in. Memory is bounded by the
rows that are requested.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quant.folds.fold import Fold, TensorEdit, combine_folds, digest_folds
from quant.folds.free_channels import find_sites
from quant.gguf.layout import encode_entry
from quant.native import ggml
from quant.source.source import Source, Weight

if TYPE_CHECKING:
    from quant.folds.fold import Ints
    from quant.native.ggml import U8

FOLD_KEY = "llmcli.quantize.fold"
HEADER_RESERVE_BYTES = 512  # upper bound of the bytes that folds add to the header
FOLDED_NOTE = (
    "folded: LoRA adapters, control vectors and projectors made for the original model do not fit"
    " the new file"
)
MAX_RANDOM_FACTOR = 1.1  # random factors are between 1 / MAX_RANDOM_FACTOR and MAX_RANDOM_FACTOR
MAX_ROW_GAP = 4  # rows at most this far apart are read together; those between them are discarded


def fold_source(source: Source, folds: Sequence[Fold], kinds: str = "") -> Source:
    """Return a source of the same model with folded weights. If no fold changes a tensor, return
    `source` itself.

    The new source's `fold_digest` is the digest of the folds; its fingerprint stays that of
    `source`. A file that is written from it records the digest and `kinds` ("awq,deal") under
    FOLD_KEY.
    """
    edits = combine_folds(folds)
    if not edits:
        return source
    record = json.dumps(
        {"digest": digest_folds(folds, source.fold_digest), "how": kinds}, sort_keys=True
    )
    entries = [(key, value) for key, value in source.entries if key != FOLD_KEY]
    weights = tuple(
        replace(
            weight,
            type="F32",
            stored_type=weight.stored_type or weight.type,
            read=partial(_read_folded, weight, edit),
        )
        if (edit := edits.get(weight.name))
        else weight
        for weight in source.weights
    )
    return replace(
        source,
        weights=weights,
        entries=(*entries, (FOLD_KEY, encode_entry("string", record))),
        notes=(*source.notes, FOLDED_NOTE),
        blobs=(),
        origin=source.origin or source,
        fold_digest=digest_folds(folds, source.fold_digest),
        fold_label=kinds,
    )


def randomize(source: Source, seed: int, spread: float = MAX_RANDOM_FACTOR) -> tuple[Fold, ...]:
    """Return folds with random factors in [1 / spread, spread] wherever factors are free, and with
    random orders wherever an order is free.

    They turn a quantized model into a test case that is like an unquantized one: its values are no
    longer on the grid of its old blocks, because the columns of a new block come from several old
    blocks and (except in a tied embedding) have different factors. The default spread is small:
    wide random factors make columns differ more than training does, which overstates the gain of
    folds.
    """
    import numpy as np

    rng, folds = np.random.default_rng(seed), []
    for site in find_sites(source):
        logs = rng.uniform(-1, 1, site.width) * np.log(spread)
        runs = range(0, site.width, site.group_size) if site.group_size else ()
        order = (
            np.concatenate([at + rng.permutation(site.group_size) for at in runs]) if runs else None
        )
        folds.append(
            Fold(site, np.exp(logs).astype(np.float32) if site.has_free_factors else None, order)
        )
    return tuple(folds)


def _read_folded(weight: Weight, edit: TensorEdit, first: int, last: int) -> "U8":
    """Read rows first .. last of a folded tensor. Return the bytes of their F32 values [rows, 4 *
    columns].
    """
    import numpy as np

    rows = np.arange(first, last)
    if edit.row_order is not None:
        rows = edit.row_order[first:last]
    stored = weight.read(first, last) if edit.row_order is None else read_rows(weight.read, rows)
    values = ggml.decode(stored, weight.type, weight.columns, label=weight.name)
    if edit.column_factors is not None:
        values = values * _row_vectors(edit.column_factors, rows, weight)
    if edit.row_factors is not None:
        values = values * edit.row_factors[rows, None]
    if edit.column_order is not None:
        order = _row_vectors(edit.column_order, rows, weight)
        values = values[:, order[0]] if len(order) == 1 else np.take_along_axis(values, order, 1)
    return np.ascontiguousarray(values, np.float32).view(np.uint8)


def _row_vectors(vectors: Any, rows: "Ints", weight: Weight) -> Any:
    """Return the vector (factors or order) for each of the requested rows [rows, columns], or [1,
    columns] if all rows are in the same matrix. `vectors` [matrices or 1, columns] has one vector
    for each matrix of the tensor.
    """
    matrices = rows // (weight.rows // len(vectors))
    return vectors[matrices[:1]] if (matrices == matrices[0]).all() else vectors[matrices]


def read_rows(read: "Callable[[int, int], U8]", rows: "Ints") -> "U8":
    """Read the given rows, which may be in any order and repeat. Return their bytes [rows,
    row_bytes]. Rows at most MAX_ROW_GAP apart are read together.
    """
    import numpy as np

    distinct = np.unique(rows)
    runs = np.split(distinct, np.flatnonzero(np.diff(distinct) > MAX_ROW_GAP) + 1)
    ranges = [read(int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs]
    return np.concatenate(ranges)[np.searchsorted(distinct, rows)]
