"""Second moments that are not there yet: which weights will have some, for a plan that is made
before.

It goes by names and shapes. A model whose attention shows itself in another way than most gets less
than is expected here: the method is then chosen anew, by what came.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from quant.recipe import EMBEDDINGS, HEAD

if TYPE_CHECKING:
    from quant.methods.base import Second
    from quant.native import F32

VALUES = re.compile(r"blk\.(\d+)\.attn_v\.weight")


def mixture(weight: str) -> str:
    """The product that mixes what comes out of a weight, "" where none does."""
    found = VALUES.fullmatch(weight)
    return f"kqv-{found[1]}" if found else ""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A Second of which only the form is known. To ask it for a number is a mistake of the
    program's.
    """

    columns: int
    matrices: int
    mixed: bool

    def mean(self, matrix: int = 0) -> "F32":
        """Nothing yet."""
        raise AssertionError(f"the moments of matrix {matrix} are not gathered yet")

    def squares(self, matrix: int = 0) -> "F32":
        """Nothing yet."""
        return self.mean(matrix)


@dataclass(frozen=True, slots=True)
class Pending:
    """What moments will be gathered from: `digest` of all that decides them ("" where that is not
    decided, either), `texts` by their names, of these `chunks` of `chunk_size` tokens (0: not
    known).
    """

    digest: str = ""
    texts: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0

    def of(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> "dict[str, Second]":
        """Of every weight (name, shape with the row length first) that a text is multiplied by. An
        embedding is read as rows, unless it is the head.
        """
        rows = EMBEDDINGS if any(name == HEAD for name, _ in tensors) else EMBEDDINGS[1:]
        return {
            name: Awaited(shape[0], prod(shape[2:]), bool(mixture(name)))
            for name, shape in tensors
            if len(shape) > 1 and name not in rows
        }
