"""What a quantized checkpoint format is to the converter: its name in config.json, and how its
tensors widen.

Tools that the formats share: reading whole small tensors, and rows computed on demand. It reads no
files itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from quant import views
from quant.archs.base import Config, Tensors
from quant.errors import Damaged, Refusal
from quant.tensors import LazyTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quant.native import F32, U8

# safetensors' names -> numpy's; bfloat16 and the eight-bit floats have no dtype of their own there.
NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}
SOURCE = "use the model that this one was made from"


@dataclass(frozen=True, slots=True)
class Input:
    """A format: `name` is config.json's quant_method, `title` what people call it.

    `restore(settings, tensors)` gives the checkpoint with its quantized tensors in a form that a
    family can place: float tensors, computed when their rows are read. `settings` is the config's
    quantization part. It leaves every tensor that it does not know where it is: the converter lists
    them as unknown. `native` formats stay as they are, and no error is added to theirs.
    """

    name: str
    title: str
    restore: Callable[[Config, Tensors], Tensors]
    native: bool = False


class Recent:
    """The tensor that was last read whole: a transposed matrix is asked for slab by slab, and read
    once for all.
    """

    def __init__(self) -> None:
        self._lock, self._name = Lock(), ""
        self._values: NDArray[Any] | None = None

    def get(self, tensor: LazyTensor) -> "NDArray[Any]":
        """All values of `tensor`; the one before it is forgotten."""
        with self._lock:
            if self._values is None or self._name != tensor.name:
                self._values = None  # before the next is read: never two of them at a time
                self._name, self._values = tensor.name, whole(tensor)
            return self._values


def unpacked(words: "NDArray[Any]", bits: int) -> "U8":
    """Codes of `bits` (up to 8) out of int32 words, the lowest bits first, along a new last axis."""
    import numpy as np

    count = 32 // bits
    codes = np.empty((*words.shape, count), np.uint8)
    for i in range(count):
        codes[..., i] = (words >> (bits * i)) & ((1 << bits) - 1)
    return codes


def streamed(words: "NDArray[Any]", bits: int) -> "U8":
    """Codes of `bits` (up to 8) out of rows of int32 words that hold them without a gap, the lowest
    bits first.
    """
    import numpy as np

    flags = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    count = flags.shape[1] // bits
    codes: U8 = np.packbits(
        flags[:, : count * bits].reshape(len(words), count, bits), axis=2, bitorder="little"
    )
    return codes[..., 0]


def whole(tensor: LazyTensor) -> "NDArray[Any]":
    """All values of a small tensor under its own shape: integers as they are, floats as float32."""
    return numbers(tensor.read(0, views.rows(tensor)), tensor.dtype).reshape(tensor.shape)


def numbers(data: "U8", dtype: str) -> "NDArray[Any]":
    """Stored bytes [rows, row_bytes] as values [rows, columns]."""
    import numpy as np

    values = np.ascontiguousarray(data).view(NUMPY[dtype])
    if dtype == "BF16":
        wide: F32 = (values.astype(np.uint32) << 16).view(np.float32)
        return wide
    if dtype.startswith("F8"):
        chosen: F32 = eight_bits(dtype)[values]
        return chosen
    stored: NDArray[Any] = values.astype(np.float32) if dtype in ("F16", "F64") else values
    return stored


@cache
def eight_bits(dtype: str) -> "F32":
    """The 256 values of an eight-bit float: F8_E4M3 (no infinities), F8_E5M2, or the bare exponent
    F8_E8M0.
    """
    import numpy as np

    codes = np.arange(256, dtype=np.uint16)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (codes << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E8M0":
        powers = np.exp2(codes.astype(np.float64) - 127)
        powers[255] = np.nan
        return powers.astype(np.float32)
    sign, exponent, fraction = (
        codes >> 7,
        (codes >> 3 & 15).astype(np.int32),
        (codes & 7).astype(np.float64),
    )
    size = np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * np.exp2(exponent - 7.0)
    )
    values = np.where(sign, -size, size).astype(np.float32)
    values[[127, 255]] = np.nan
    return values


def computed(
    name: str, like: LazyTensor, shape: tuple[int, ...], rows: "Callable[[int, int], F32]"
) -> LazyTensor:
    """A float tensor whose rows `rows(first, last)` computes; what is not finite is refused by
    name.
    """
    import numpy as np

    def read(first: int, last: int) -> "U8":
        with np.errstate(all="ignore"):  # what overflows is told below, by the tensor's name
            values = np.ascontiguousarray(rows(first, last), np.float32)
        if not np.isfinite(values).all():
            raise Damaged(
                f"tensor {name} holds NaN or infinite values",
                hint="the source is damaged: fetch it again",
            )
        return values.view(np.uint8)

    return LazyTensor(name, shape, "F32", like.file, read)


def refuse(settings: Config, what: str, hint: str = SOURCE) -> Refusal:
    """The error for settings or tensors that this format cannot have."""
    return Refusal(f"{settings.where}: {what}", hint=hint)
