"""Stand-ins for second moments that are not collected yet, so that a plan can be made before the
calibration.

The plan only needs to know which weights will have moments, and this is predicted from names and
shapes. A model whose attention llama.cpp computes in an unusual way gets fewer moments than
predicted; the method of the affected tensors is then chosen again from the collected moments.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from quant.recipes.tensor_types import EMBEDDING_NAMES, HEAD_NAME

if TYPE_CHECKING:
    from quant.calibration.statistics import SecondMoments
    from quant.native.ggml import F32

VALUE_WEIGHT = re.compile(r"blk\.(\d+)\.attn_v\.weight")


def mixing_product(weight: str) -> str:
    """Return the name of the attention product that mixes the outputs of a value weight ("kqv-5"
    for "blk.5.attn_v.weight"), or "" for other weights.
    """
    match = VALUE_WEIGHT.fullmatch(weight)
    return f"kqv-{match[1]}" if match else ""


@dataclass(frozen=True, slots=True)
class ExpectedInput:
    """SecondMoments of which only the shape is known. Reading values from them is a programming
    error.
    """

    columns: int
    matrices: int
    mixed: bool

    def mean(self, matrix: int = 0) -> "F32":
        """Raise AssertionError."""
        raise AssertionError(f"the moments of matrix {matrix} are not gathered yet")

    def squares(self, matrix: int = 0) -> "F32":
        """Raise AssertionError."""
        return self.mean(matrix)


@dataclass(frozen=True, slots=True)
class ExpectedMoments:
    """A calibration that has not run yet: `digest` of everything that determines its moments ("" if
    undecided), the names of its `texts`, and `chunks` of `chunk_size` tokens (0: unknown).
    """

    digest: str = ""
    texts: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0

    def expected_inputs(
        self, tensors: Sequence[tuple[str, Sequence[int]]]
    ) -> "dict[str, SecondMoments]":
        """Return the expected moments of the weights among `tensors` (name, shape with the row
        length first) that are multiplied. An embedding only counts if it is also the head, because
        its rows are otherwise looked up.
        """
        rows = (
            EMBEDDING_NAMES
            if any(name == HEAD_NAME for name, _ in tensors)
            else EMBEDDING_NAMES[1:]
        )
        return {
            name: ExpectedInput(shape[0], prod(shape[2:]), bool(mixing_product(name)))
            for name, shape in tensors
            if len(shape) > 1 and name not in rows
        }
