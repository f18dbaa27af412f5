"""The few operations of an array search, spelled for numpy and for torch: the same arithmetic on a CPU and on a GPU.

numpy is the truth; torch serves where a device is faster. Elementwise operations write into arrays that are there
already, and sums run over the first axis, so that they add up in the same order for every column.
"""

import importlib.util
import sys
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.native import F32

Array = Any  # of numpy or of torch
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows below Linux, of AMD


class Numpy:
    """On the CPU."""

    def __init__(self) -> None:
        import numpy as np

        self.np = np
        self.multiply, self.add, self.subtract, self.clip = np.multiply, np.add, np.subtract, np.clip
        self.round, self.sqrt = np.rint, np.sqrt
        self.where: Any = np.where

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
        return self.np.einsum(",".join(["ig"] * len(factors)) + "->g", *flat).reshape(factors[0].shape[1:])

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

    def numpy(self, values: Array) -> "F32":
        found: F32 = values
        return found


class Torch:
    """On a device of torch's: "cuda", "mps" or "cpu"."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.multiply, self.add, self.subtract, self.where = torch.multiply, torch.add, torch.subtract, torch.where
        self.quiet = torch.inference_mode
        self.round, self.sqrt, self.empty_like = torch.round, torch.sqrt, torch.empty_like

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

    def numpy(self, values: Array) -> "F32":
        found: F32 = values.cpu().numpy()
        return found


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


@cache
def operations(where: str | None = None) -> Ops:
    """The operations on a device of torch's, or numpy's where that is None."""
    return Torch(where) if where else Numpy()
