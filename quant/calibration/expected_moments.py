"""Stand-ins for second moments that are not collected yet, so that a quantization can be planned
before the calibration runs.

A plan only needs to know which weights will have moments. This is predicted from names and shapes.
If llama.cpp computes a model's attention in an unusual way, fewer weights get moments than
predicted; the methods of these weights are then chosen again, from the collected moments.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from quant.calibration.text_record import UNKNOWN_TEXT, TextRecord
from quant.recipes.tensor_types import EMBEDDING_NAMES, HEAD_NAME

if TYPE_CHECKING:
    from quant.calibration.statistics import SecondMoments
    from quant.native.ggml import F32

VALUE_WEIGHT = re.compile(r"blk\.(\d+)\.attn_v\.weight")


def mixing_product(weight: str) -> str:
    """Return llama.cpp's name of the product in which attention mixes the values that a value
    weight computes ("kqv-5" for "blk.5.attn_v.weight"). Return "" if `weight` is not a value
    weight.
    """
    match = VALUE_WEIGHT.fullmatch(weight)
    return f"kqv-{match[1]}" if match else ""


@dataclass(frozen=True, slots=True)
class ExpectedInput:
    """A stand-in for the SecondMoments of one tensor's input. Only the shape is known, so reading
    moments from it is a programming error.
    """

    columns: int
    matrices: int
    mixed: bool

    def mean(self, matrix: int = 0) -> "F32":
        """Raise AssertionError, because the moments are not collected yet."""
        raise AssertionError(f"the moments of matrix {matrix} are not gathered yet")

    def squares(self, matrix: int = 0) -> "F32":
        """Raise AssertionError, because the moments are not collected yet."""
        return self.mean(matrix)


@dataclass(frozen=True, slots=True)
class ExpectedMoments:
    """A calibration that has not run yet.

    `digest` identifies everything that determines its moments ("" if that is not decided yet).
    `text` is about its texts, which are read as `chunks` chunks of `chunk_size` tokens (0 if
    unknown).
    """

    digest: str = ""
    text: TextRecord = UNKNOWN_TEXT
    chunks: int = 0
    chunk_size: int = 0

    def expected_inputs(
        self, tensors: Sequence[tuple[str, Sequence[int]]]
    ) -> "dict[str, SecondMoments]":
        """Return a stand-in for each weight whose input the calibration will measure, by name.
        `tensors` are pairs of a name and a shape with the row length first.

        These are all matrices, except embeddings whose rows are only looked up: an embedding counts
        only if it is also the output head.
        """
        looked_up = (
            EMBEDDING_NAMES
            if any(name == HEAD_NAME for name, _ in tensors)
            else EMBEDDING_NAMES[1:]
        )
        return {
            name: ExpectedInput(shape[0], prod(shape[2:]), bool(mixing_product(name)))
            for name, shape in tensors
            if len(shape) > 1 and name not in looked_up
        }
