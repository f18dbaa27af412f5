"""The interface of a quantized checkpoint format, and functions that several formats use: to read
small tensors whole, to unpack codes, and to make tensors whose rows are computed on demand.

A checkpoint may be on a server and contain a hundred thousand matrices. Therefore a format does not
read tensors of each matrix when the checkpoint is opened: it derives shapes from the headers, reads
one tensor of each kind (matrix_kind()), and checks the others when their rows are read.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import DTYPE_BYTES, LazyTensor, Tensors
from quant.errors import DamagedSourceError, UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8

# safetensors' dtype -> numpy's; bfloat16 and the 8-bit floats have no numpy dtype.
NUMPY_DTYPES = {
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
ORIGINAL_MODEL_HINT = "use the model that this one was quantized from"
REFETCH_HINT = "fetch the whole model again"


@dataclass(frozen=True, slots=True)
class QuantizedInput:
    """One quantized checkpoint format.

    - `name`: the value of quant_method in config.json.
    - `title`: the name that users see.
    - `restore(settings, tensors)`: a function that returns the tensors with each quantized one
      replaced by a float tensor, whose values are computed when its rows are read, or by a tensor
      of ggml's own blocks. `settings` is the quantization part of config.json. Tensors that the
      function does not recognize stay unchanged, and the converter reports them as unknown.
    """

    name: str
    title: str
    restore: Callable[[CheckpointConfig, Tensors], Tensors]


class LastTensorsCache:
    """A cache that contains all values of the last `count` tensors that were read. A transposed
    matrix needs it, because every few rows of the result are computed from the whole stored tensor,
    and so do scales that all rows share.
    """

    def __init__(self, count: int = 1) -> None:
        self._lock, self._count = Lock(), count
        self._values: OrderedDict[str, NDArray[Any]] = OrderedDict()

    def read(self, tensor: LazyTensor) -> "NDArray[Any]":
        """Return all values of `tensor`, from the cache if they are there. Otherwise they are read
        and replace the tensor that was read first.
        """
        with self._lock:
            if tensor.name not in self._values:
                # freed first, so that memory never holds more than `count` tensors
                while len(self._values) >= self._count:
                    self._values.popitem(last=False)
                self._values[tensor.name] = read_all(tensor)
            return self._values[tensor.name]


def matrix_kind(name: str, *stored: LazyTensor) -> tuple[Any, ...]:
    """Return a key that is equal for matrices of the same role in all layers and experts, if their
    stored tensors `stored` have the same shapes and dtypes. Such matrices have the same shape.
    """
    return (re.sub(r"\d+", "#", name), *((tensor.shape, tensor.dtype) for tensor in stored))


def unpack_words(words: "NDArray[Any]", bits: int) -> "U8":
    """Return the codes of `bits` (up to 8) bits in int32 words, lowest bits first, as uint8.

    No code is split over two words; unused bits at the end of a word are ignored. Shapes: words
    `[...]`, result `[..., 32 // bits]`.
    """
    import numpy as np

    count = 32 // bits
    codes = np.empty((*words.shape, count), np.uint8)
    for i in range(count):
        codes[..., i] = (words >> (bits * i)) & ((1 << bits) - 1)
    return codes


def unpack_stream(words: "NDArray[Any]", bits: int) -> "U8":
    """Return the codes of `bits` (up to 8) bits in rows of int32 words, lowest bits first, as
    uint8.

    The codes of a row follow one another without gaps, so that a code may be split over two words.
    Shapes: words `[rows, words]`, result `[rows, 32 * words // bits]`.
    """
    import numpy as np

    flags = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    count = flags.shape[1] // bits
    codes: U8 = np.packbits(
        flags[:, : count * bits].reshape(len(words), count, bits), axis=2, bitorder="little"
    )
    return codes[..., 0]


def read_all(tensor: LazyTensor) -> "NDArray[Any]":
    """Return all values of a small tensor, in the tensor's shape. Floats become float32; integers
    keep their type.
    """
    return decode_values(tensor.read(0, tensor_views.row_count(tensor)), tensor.dtype).reshape(
        tensor.shape
    )


def read_span(tensor: LazyTensor, first: int, last: int) -> "U8":
    """Return the bytes first .. last of a tensor's data, uint8 `[last - first]`."""
    width = tensor.shape[-1] * DTYPE_BYTES[tensor.dtype]
    start = first // width
    return tensor.read(start, -(-last // width)).reshape(-1)[first - start * width :][
        : last - first
    ]


def decode_values(data: "U8", dtype: str) -> "NDArray[Any]":
    """Return the values `[rows, columns]` of stored bytes `[rows, row_bytes]`. Floats become
    float32; integers keep their type.
    """
    import numpy as np

    values = np.ascontiguousarray(data).view(NUMPY_DTYPES[dtype])
    if dtype == "BF16":
        widened: F32 = (values.astype(np.uint32) << 16).view(np.float32)
        return widened
    if dtype.startswith("F8"):
        looked_up: F32 = float8_values(dtype)[values]
        return looked_up
    stored: NDArray[Any] = values.astype(np.float32) if dtype in ("F16", "F64") else values
    return stored


@cache
def float8_values(dtype: str) -> "F32":
    """Return a table of the 256 values of an 8-bit float type, float32 [256]: F8_E4M3 (without
    infinities), F8_E5M2, or F8_E8M0 (only an exponent, as in scales).
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
    magnitude = np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * np.exp2(exponent - 7.0)
    )
    values = np.where(sign, -magnitude, magnitude).astype(np.float32)
    values[[127, 255]] = np.nan
    return values


def make_computed_tensor(
    name: str, template: LazyTensor, shape: tuple[int, ...], rows: "Callable[[int, int], F32]"
) -> LazyTensor:
    """Return an F32 tensor whose values are computed when they are read: `rows(first, last)`
    returns them as `[rows, columns]`. The file of the tensor, for messages, is that of `template`.

    Reading raises DamagedSourceError, with the tensor's name, if a value is NaN or infinite.
    """
    import numpy as np

    def read(first: int, last: int) -> "U8":
        # overflow makes infinite values, which are reported below with the tensor's name
        with np.errstate(all="ignore"):
            values = np.ascontiguousarray(rows(first, last), np.float32)
        if not np.isfinite(values).all():
            raise make_nan_error(name)
        return values.view(np.uint8)

    return LazyTensor(name, shape, "F32", template.file, read)


def make_duplicate_error(settings: CheckpointConfig, name: str) -> UserError:
    """Return the error that the matrix `name` is stored twice."""
    return make_input_error(
        settings, f"{name} is stored both as floats and as codes", hint=REFETCH_HINT
    )


def make_nan_error(name: str) -> DamagedSourceError:
    """Return the error that the tensor `name` contains NaN or infinite values."""
    return DamagedSourceError(
        f"tensor {name} contains NaN or infinite values",
        hint="the source is damaged: fetch it again",
    )


def make_input_error(
    settings: CheckpointConfig, problem: str, hint: str = ORIGINAL_MODEL_HINT
) -> UserError:
    """Return the error that the checkpoint's quantization settings or tensors are not supported.
    `problem` says what is wrong.
    """
    return UserError(f"{settings.location}: {problem}", hint=hint)
