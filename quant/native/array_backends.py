"""The array operations of the searches, for numpy and for torch: the same arithmetic on a CPU and
on a GPU.

numpy is the reference; torch is used if there is a GPU. Elementwise operations can write into
existing arrays. Sums run over the first axis, so that they add in the same order for every column.

Threads take turns on a device (`exclusive_access`), so that only one thread's arrays need memory
there. Meanwhile the other threads pack, decode and access files. If memory runs out anyway,
DeviceOutOfMemory is raised and the caller retries with fewer rows.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from quant.errors import UserError
from quant.native import cholesky, processors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8

    F64 = NDArray[np.float64]

Array = Any  # an array of numpy, or a tensor of torch
# Parts of torch's error messages for CUDA, Metal or cuBLAS when memory runs out.
OUT_OF_MEMORY_TEXTS = ("out of memory", "ALLOC_FAILED")
CPU_HINT = (
    "free some of its memory, or do without the GPU:"
    " put CUDA_VISIBLE_DEVICES= before the same command"
)
# Device files of the GPU drivers of NVIDIA, of Windows Subsystem for Linux, and of AMD.
GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


class DeviceOutOfMemory(Exception):
    """The device does not have enough memory for an operation."""


class NumpyBackend:
    """The operations of numpy, on the CPU."""

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

    def exclusive_access(self) -> AbstractContextManager[object]:
        """Return a context in which the thread has the device for itself. It raises
        DeviceOutOfMemory if the device runs out of memory. On a CPU it does nothing.
        """
        return nullcontext()

    def without_warnings(self) -> AbstractContextManager[object]:
        """Return a context without floating-point warnings and without gradients."""
        return self.np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")

    def array(self, values: "F32") -> Array:
        """Return numpy values as a contiguous F32 array on the device."""
        return self.np.ascontiguousarray(values, self.np.float32)

    def empty_like(self, values: Array) -> Array:
        return self.np.empty_like(values)

    def zeros(self, *shape: int) -> Array:
        """Return F32 zeros of this shape."""
        return self.np.zeros(shape, self.np.float32)

    def clip_in_place(self, values: Array, low: Any, high: Any) -> None:
        """Clip values to low .. high in place. This is faster than clip() for short arrays."""
        self.np.maximum(values, low, out=values)
        self.np.minimum(values, high, out=values)

    def sum(self, values: Array) -> Array:
        """Return sums over the first axis."""
        return self.np.add.reduce(values, axis=0)

    def dot(self, *factors: Array) -> Array:
        """Return the sums over the first axis of the products of two or three arrays of the same
        shape.
        """
        flat = (values.reshape(len(values), -1) for values in factors)
        return self.np.einsum(",".join(["ig"] * len(factors)) + "->g", *flat).reshape(
            factors[0].shape[1:]
        )

    def minimum(self, values: Array) -> Array:
        """Return minimums over the first axis."""
        return self.np.minimum.reduce(values, axis=0)

    def maximum(self, values: Array) -> Array:
        """Return maximums over the first axis."""
        return self.np.maximum.reduce(values, axis=0)

    def round_to_f16(self, values: Array) -> Array:
        """Return the values rounded to F16, as F32; values that are too large become infinite."""
        with self.np.errstate(over="ignore"):
            return values.astype(self.np.float16).astype(self.np.float32)

    def factor_udu(self, moments: "F32", diagonal: "F64") -> tuple[Array, Array] | None:
        """Factor the symmetric matrix `moments` [n, n], with `diagonal` [n] in place of its own,
        into (I + F) D (I + F)^T, with F strictly upper triangular and D diagonal.

        Return F transposed [n, n] and D [n] as F32, or None if the matrix is not positive definite.
        """
        return cholesky.factor_udu(moments, diagonal, processors.worker_count())

    def to_numpy(self, values: Array) -> "F32":
        """Return an array of this backend as a numpy array."""
        array: F32 = values
        return array


class TorchBackend:
    """The operations of torch on a device ("cuda", "mps" or "cpu"). They are documented in
    NumpyBackend.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device, self.lock = torch, torch.device(device), Lock()
        self.multiply, self.add, self.subtract, self.where = (
            torch.multiply,
            torch.add,
            torch.subtract,
            torch.where,
        )
        self.without_warnings = torch.inference_mode
        self.round, self.sqrt, self.empty_like = torch.round, torch.sqrt, torch.empty_like

    @contextmanager
    def exclusive_access(self) -> Iterator[None]:
        with self.lock:
            try:
                yield
            except RuntimeError as error:
                if not _is_memory_error(error):
                    raise
                raise DeviceOutOfMemory from None

    def array(self, values: "F32") -> Array:
        import numpy as np

        return self.torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.device)

    def clip(self, values: Array, low: float, high: float, out: Array = None) -> Array:
        return self.torch.clamp(values, low, high, out=out)

    def zeros(self, *shape: int) -> Array:
        return self.torch.zeros(shape, device=self.device)

    def clip_in_place(self, values: Array, low: Any, high: Any) -> None:
        self.torch.clamp(values, low, high, out=values)

    def sum(self, values: Array) -> Array:
        return values.sum(0)

    def dot(self, first: Array, *factors: Array) -> Array:
        for factor in factors:
            first = first * factor
        return first.sum(0)

    def minimum(self, values: Array) -> Array:
        return values.amin(0)

    def maximum(self, values: Array) -> Array:
        return values.amax(0)

    def round_to_f16(self, values: Array) -> Array:
        return values.half().float()

    def factor_udu(self, moments: "F32", diagonal: "F64") -> tuple[Array, Array] | None:
        if self.device.type != "mps":  # MPS has no float64
            try:
                return self._udu(moments, diagonal)
            except RuntimeError as error:
                if not _is_memory_error(error):
                    raise
        factors = NumpyBackend().factor_udu(moments, diagonal)
        return factors and (self.array(factors[0]), self.array(factors[1]))

    def _udu(self, moments: "F32", diagonal: "F64") -> tuple[Array, Array] | None:
        """Do what factor_udu() does, with torch on the device."""
        matrix = self.array(moments).double()
        matrix.diagonal().copy_(self.torch.from_numpy(diagonal))
        lower, failed = self.torch.linalg.cholesky_ex(matrix.flip(0, 1))
        upper = lower.flip(0, 1)
        root = upper.diagonal()
        if self.to_numpy(failed | ~self.torch.isfinite(root).all()).any():
            return None
        return (upper.T / root[:, None]).float().fill_diagonal_(0), (root * root).float()

    def to_numpy(self, values: Array) -> "F32":
        array: F32 = values.cpu().numpy()
        return array


def _is_memory_error(error: RuntimeError) -> bool:
    """Return whether an error of torch means that memory ran out."""
    return any(words in str(error) for words in OUT_OF_MEMORY_TEXTS)


ArrayBackend = NumpyBackend | TorchBackend


@cache
def device() -> str | None:
    """Return the GPU that torch can use, "cuda" or "mps"; None if there is no torch or no GPU.

    Importing torch takes seconds, so torch is imported only if the system has a GPU driver.
    """
    has_driver = sys.platform in ("darwin", "win32") or any(
        Path(path).exists() for path in GPU_DEVICE_FILES
    )
    if not has_driver or importlib.util.find_spec("torch") is None:
        return None
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else None


def retry_in_halves(encode: "Callable[[F32, int], U8]", label: str) -> "Callable[[F32, int], U8]":
    """Return a function like the encoder `encode(rows, first)` that splits the rows in halves and
    retries if the device runs out of memory.

    It raises UserError, with `label`, if there is not enough memory for a single row.
    """
    import numpy as np

    def encode_or_split(rows: "F32", first: int) -> "U8":
        try:
            return encode(rows, first)
        except DeviceOutOfMemory:  # the memory of the failed attempt is freed when this block ends
            if len(rows) < 2:
                raise out_of_memory_error(label) from None
        middle = len(rows) // 2
        return np.concatenate(
            [encode_or_split(rows[:middle], first), encode_or_split(rows[middle:], first + middle)]
        )

    return encode_or_split


def out_of_memory_error(label: str) -> UserError:
    """Return the error for a device that does not have enough memory even for a single row."""
    return UserError(f"the GPU has no memory left for {label}", hint=CPU_HINT)


@cache
def array_backend(device: str | None = None) -> ArrayBackend:
    """Return the backend of torch on a device, or that of numpy if `device` is None. There is one
    for each device, so that all threads take turns on it.
    """
    return TorchBackend(device) if device else NumpyBackend()
