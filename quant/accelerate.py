"""The few operations of an array search, spelled for numpy and for torch: the same arithmetic on a
CPU and on a GPU.

numpy is the truth; torch serves where a device is faster. Elementwise operations write into arrays
that are there already, and sums run over the first axis, so that they add up in the same order for
every column.

Threads take turns on a device (`alone`): what it must have room for is one thread's, and they have
the packing, the decoding and the files to do meanwhile. Where there is no room all the same it is
Full, and whoever asked takes less.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from quant.errors import Refusal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native import F32, U8

    F64 = NDArray[np.float64]

Array = Any  # of numpy or of torch
FULL = (
    "out of memory",
    "ALLOC_FAILED",
)  # in what torch says of CUDA's memory and of Metal's, and in what cuBLAS says
WITHOUT = (
    "free some of its memory, or compute without it: CUDA_VISIBLE_DEVICES= before the same command"
)
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows below Linux, of AMD


class Full(Exception):
    """A device has no memory left for what was asked of it."""


class Numpy:
    """On the CPU."""

    def __init__(self) -> None:
        import numpy as np

        self.np = np
        self.multiply, self.add, self.subtract, self.clip = (
            np.multiply,
            np.add,
            np.subtract,
            np.clip,
        )
        self.round, self.sqrt = np.rint, np.sqrt
        self.where: Any = np.where

    def alone(self) -> AbstractContextManager[object]:
        """Whose turn it is on the device; raises Full. A CPU has room for all."""
        return nullcontext()

    def quiet(self) -> AbstractContextManager[object]:
        """Nothing is told of what gets infinite, and no gradient is kept."""
        return self.np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")

    def array(self, values: "F32") -> Array:
        """Values of numpy, laid out one behind the other."""
        return self.np.ascontiguousarray(values, self.np.float32)

    def empty_like(self, values: Array) -> Array:
        return self.np.empty_like(values)

    def zeros(self, *shape: int) -> Array:
        """F32 zeros."""
        return self.np.zeros(shape, self.np.float32)

    def bound(self, values: Array, low: Any, high: Any) -> None:
        """Clip in place: for short arrays, where what clip does beside that takes longer."""
        self.np.maximum(values, low, out=values)
        self.np.minimum(values, high, out=values)

    def total(self, values: Array) -> Array:
        """Sums over the first axis."""
        return self.np.add.reduce(values, axis=0)

    def dot(self, *factors: Array) -> Array:
        """Sums of products of two or three arrays over the first axis."""
        flat = (values.reshape(len(values), -1) for values in factors)
        return self.np.einsum(",".join(["ig"] * len(factors)) + "->g", *flat).reshape(
            factors[0].shape[1:]
        )

    def least(self, values: Array) -> Array:
        """The smallest over the first axis."""
        return self.np.minimum.reduce(values, axis=0)

    def most(self, values: Array) -> Array:
        """The largest over the first axis."""
        return self.np.maximum.reduce(values, axis=0)

    def half(self, values: Array) -> Array:
        """The same as they are after a stay in an F16; what is too large is infinite."""
        with self.np.errstate(over="ignore"):
            return values.astype(self.np.float16).astype(self.np.float32)

    def udu(self, matrix: "F64") -> tuple[Array, Array] | None:
        """Of a matrix [n, n] = (I + F) D (I + F)^T, F strictly upper: F transposed and D [n], F32;
        None where it is not positive. One Cholesky factorisation, read backwards.
        """
        np = self.np
        try:
            lower = np.linalg.cholesky(matrix[::-1, ::-1])
        except np.linalg.LinAlgError:
            return None
        upper = lower[::-1, ::-1]  # matrix = upper upper^T
        root = upper.diagonal().copy()
        if not np.isfinite(root).all():
            return None
        feed = np.empty(
            matrix.shape, np.float32
        )  # no float64 between: fresh pages cost more than the work
        np.divide(upper.T, root[:, None], out=feed, casting="same_kind")
        np.fill_diagonal(feed, 0)
        return feed, (root * root).astype(np.float32)

    def numpy(self, values: Array) -> "F32":
        found: F32 = values
        return found


class Torch:
    """On a device of torch's: "cuda", "mps" or "cpu"."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device, self.turn = torch, torch.device(device), Lock()
        self.multiply, self.add, self.subtract, self.where = (
            torch.multiply,
            torch.add,
            torch.subtract,
            torch.where,
        )
        self.quiet = torch.inference_mode
        self.round, self.sqrt, self.empty_like = torch.round, torch.sqrt, torch.empty_like

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.turn:
            try:
                yield
            except RuntimeError as problem:
                if not _full(problem):
                    raise
                raise Full from None

    def array(self, values: "F32") -> Array:
        import numpy as np

        return self.torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.device)

    def clip(self, values: Array, low: float, high: float, out: Array = None) -> Array:
        return self.torch.clamp(values, low, high, out=out)

    def zeros(self, *shape: int) -> Array:
        return self.torch.zeros(shape, device=self.device)

    def bound(self, values: Array, low: Any, high: Any) -> None:
        self.torch.clamp(values, low, high, out=values)

    def total(self, values: Array) -> Array:
        return values.sum(0)

    def dot(self, first: Array, *factors: Array) -> Array:
        for factor in factors:
            first = first * factor
        return first.sum(0)

    def least(self, values: Array) -> Array:
        return values.amin(0)

    def most(self, values: Array) -> Array:
        return values.amax(0)

    def half(self, values: Array) -> Array:
        return values.half().float()

    def udu(self, matrix: "F64") -> tuple[Array, Array] | None:
        if self.device.type != "mps":  # which has no float64
            try:
                return self._udu(self.torch.from_numpy(matrix).to(self.device))
            except RuntimeError as problem:
                if not _full(problem):
                    raise
        found = Numpy().udu(matrix)
        return found and (self.array(found[0]), self.array(found[1]))

    def _udu(self, matrix: Array) -> tuple[Array, Array] | None:
        lower, failed = self.torch.linalg.cholesky_ex(matrix.flip(0, 1))
        upper = lower.flip(0, 1)
        root = upper.diagonal()
        if self.numpy(failed | ~self.torch.isfinite(root).all()).any():
            return None
        return (upper.T / root[:, None]).float().fill_diagonal_(0), (root * root).float()

    def numpy(self, values: Array) -> "F32":
        found: F32 = values.cpu().numpy()
        return found


def _full(problem: RuntimeError) -> bool:
    """Whether it is memory that torch complains of."""
    return any(words in str(problem) for words in FULL)


Ops = Numpy | Torch


@cache
def device() -> str | None:
    """A GPU that torch can use, "cuda" or "mps"; None without torch or without one.

    torch takes seconds to be imported: where the system knows no GPU it is not asked.
    """
    known = sys.platform in ("darwin", "win32") or any(Path(place).exists() for place in DRIVERS)
    if not known or importlib.util.find_spec("torch") is None:
        return None
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else None


def halved(solve: "Callable[[F32, int], U8]", label: str) -> "Callable[[F32, int], U8]":
    """`solve`, of rows and the number of the first, half of them at a time where a device has no
    room for all; raises Refusal where it has none for one.
    """
    import numpy as np

    def solved(rows: "F32", first: int) -> "U8":
        try:
            return solve(rows, first)
        except Full:  # what the failed try held is free once this block is left
            if len(rows) < 2:
                raise no_room(label) from None
        middle = len(rows) // 2
        return np.concatenate([solved(rows[:middle], first), solved(rows[middle:], first + middle)])

    return solved


def no_room(label: str) -> Refusal:
    """What is said where a device is full and nothing smaller can be asked of it."""
    return Refusal(f"the GPU has no memory left for {label}", hint=WITHOUT)


@cache
def operations(where: str | None = None) -> Ops:
    """The operations on a device of torch's, or numpy's where that is None."""
    return Torch(where) if where else Numpy()
