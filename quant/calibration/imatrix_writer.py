"""Writes importance matrices as GGUF files, in the form that llama-imatrix writes."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from quant.calibration.imatrix import (
    CHUNK_SIZE_KEY,
    CHUNKS_KEY,
    COUNTS_SUFFIX,
    DATASETS_KEY,
    KINDS_KEY,
    MODEL_KEY,
    SUMS_SUFFIX,
    TRANSFORM_KEY,
    WINDOWS_KEY,
)
from quant.calibration.text_record import TextRecord
from quant.errors import UserError
from quant.gguf.layout import encode_entry, lay_out_file
from quant.model_file.load_checks import IMATRIX_TYPE

F64 = NDArray[np.float64]
ALIGNMENT_BYTES = 32


def build_imatrix_file(
    sums: Mapping[str, F64],
    counts: Mapping[str, F64],
    text: TextRecord,
    chunks: int,
    chunk_size: int,
    model: str = "",
    transform: str | None = None,
) -> list[bytes]:
    """Return the content of an imatrix file as a list of byte strings to be written one after
    another.

    `sums` contains the sums of squares of each weight's input columns, `[matrices, columns]`, and
    `counts` the numbers of rows that were added, `[matrices]`; both have the weight's name as key.
    `text` was read as `chunks` chunks of `chunk_size` tokens. `model` and `transform` are written
    under llmcli's own keys (see Imatrix). Raises UserError if `sums` is empty.
    """
    if not sums:
        raise UserError(
            "the model multiplied by no weight that has a name", hint="is it a language model?"
        )
    entries = [
        ("general.type", encode_entry("string", IMATRIX_TYPE)),
        (DATASETS_KEY, encode_entry("array:string", list(text.names))),
        (CHUNKS_KEY, encode_entry("uint32", chunks)),
        (CHUNK_SIZE_KEY, encode_entry("uint32", chunk_size)),
    ]
    extra = {MODEL_KEY: model or None, TRANSFORM_KEY: transform}
    entries += [
        (key, encode_entry("string", value)) for key, value in extra.items() if value is not None
    ]
    if text.kinds:
        entries.append((KINDS_KEY, encode_entry("array:string", list(text.kinds))))
    if text.windows:
        entries.append((WINDOWS_KEY, encode_entry("array:uint32", list(text.windows))))
    arrays: list[tuple[str, F64]] = []
    for name in sorted(sums):
        rows = counts[name]
        arrays += [
            (name + SUMS_SUFFIX, sums[name].reshape(len(rows), -1)),
            (name + COUNTS_SUFFIX, rows[:, None]),
        ]
    layout = lay_out_file(
        entries, [(name, values.shape[::-1], "F32") for name, values in arrays], ALIGNMENT_BYTES
    )
    pieces, at = [layout.header], len(layout.header)
    for slot, (_, values) in zip(layout.slots, arrays, strict=True):
        raw = values.astype("<f4").tobytes()
        pieces += [bytes(slot.offset - at), raw]
        at = slot.offset + len(raw)
    return [*pieces, bytes(layout.nbytes - at)]
