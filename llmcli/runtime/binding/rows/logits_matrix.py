"""Several rows of logits as one matrix, without copying them."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.rows.logits_row import LogitsRow


def logits_matrix(rows: Sequence[LogitsRow], n_vocab: int) -> NDArray[np.float32]:
    """Return all rows of logits of one pass as one view `[rows, n_vocab]`, float32. The view is
    valid until the next pass.

    `rows` must contain every row of the pass in order: llama.cpp stores them one after another in
    the order of the batch (llama_context::output_reorder). An assertion fails if they are not
    adjacent.
    """
    first = rows[0].address
    assert all(row.address == first + 4 * n_vocab * number for number, row in enumerate(rows)), (
        "rows are not adjacent"
    )
    array: Any = (ctypes.c_float * (len(rows) * n_vocab)).from_address(first)
    return np.frombuffer(array, np.float32).reshape(len(rows), n_vocab)
