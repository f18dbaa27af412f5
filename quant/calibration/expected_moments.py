"""Second moments that will be collected, for a plan that is made before the calibration.

They are predicted from names and shapes. A model whose attention llama.cpp computes in an unusual
way gets fewer moments than predicted; the method is then chosen again from the collected ones.
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
    """Return the name of the product that mixes the outputs of a weight, or ""."""
    match = VALUE_WEIGHT.fullmatch(weight)
    return f"kqv-{match[1]}" if match else ""


@dataclass(frozen=True, slots=True)
class ExpectedInput:
    """SecondMoments of which only the shape is known. Reading a number is a programming error."""

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
    """The calibration that moments will come from: `digest` of everything that determines them (""
    if undecided), `texts` by name, and `chunks` of `chunk_size` tokens (0: unknown).
    """

    digest: str = ""
    texts: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0

    def expected_inputs(
        self, tensors: Sequence[tuple[str, Sequence[int]]]
    ) -> "dict[str, SecondMoments]":
        """Return the expected moments of every weight (name, shape with the row length first) that
        is multiplied. The rows of an embedding are looked up, unless it is also the head.
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
