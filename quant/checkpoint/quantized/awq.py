"""AWQ checkpoints: codes of 4 bits in int32 words, with a scale and a zero for each group of inputs
(columns of the matrix).

Follows AutoAWQ (awq/utils/packing_utils.py, awq/modules/linear/gemv.py), in float32: a value is
(code - zero) * scale. Two layouts exist, `version` in the settings:

- gemm: qweight `[inputs, outputs / 8]`, scales `[groups, outputs]`, qzeros `[groups, outputs / 8]`.
  The codes of eight neighboring outputs lie in a word in the order of GEMM_ORDER.
- gemv: qweight `[outputs, inputs / 8]`, lowest bits first, scales `[outputs, 8 * w]`, qzeros
  `[outputs, w]`, with unused groups at the end of a row.

Layers that were not quantized are floats.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import gptq
from quant.checkpoint.quantized.base import (
    LastTensorsCache,
    QuantizedInput,
    decode_values,
    make_computed_tensor,
    make_duplicate_error,
    make_input_error,
    unpack_words,
)
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor, Tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8

BITS, WORD_CODES = 4, 8
# Position in a word of each of its eight outputs (AWQ_REVERSE_ORDER of AutoAWQ).
GEMM_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
LAYOUTS = ("gemm", "gemv")


@dataclass(frozen=True, slots=True)
class GemmMatrix:
    """The stored tensors of one matrix in the gemm layout. `size` is the number of neighboring
    inputs in a group. The caches are shared by all matrices of the checkpoint.
    """

    qweight: LazyTensor
    qzeros: LazyTensor
    scales: LazyTensor
    size: int
    cache: LastTensorsCache
    small_cache: LastTensorsCache

    @property
    def shape(self) -> tuple[int, int]:
        """The rows (outputs) and columns (inputs) of the decoded matrix."""
        return self.scales.shape[1], self.qweight.shape[0]

    def read_rows(self, first: int, last: int) -> "F32":
        """Return rows first .. last of the decoded matrix as float32 `[rows, inputs]`. A row
        belongs to one output.

        The inputs are decoded in bands, so that temporary memory does not grow with the matrix.
        """
        import numpy as np

        words = self.cache.read(self.qweight)
        scales = self.small_cache.read(self.scales)[:, first:last].astype(np.float32)
        zeros = _gemm_codes(self.small_cache.read(self.qzeros), first, last).astype(np.float32)
        out = np.empty((last - first, len(words)), np.float32)
        step = max(1, gptq.BAND_CODES // (last - first))
        for start in range(0, len(words), step):
            codes = _gemm_codes(words[start : start + step], first, last)
            group = np.arange(start, start + len(codes)) // self.size
            out[:, start : start + len(codes)] = ((codes - zeros[group]) * scales[group]).T
        return out


def _gemm_codes(words: "NDArray[np.int32]", first: int, last: int) -> "U8":
    """Return the codes of outputs first .. last in rows of words in the gemm layout, uint8 `[rows,
    outputs]`.
    """
    start = first // WORD_CODES
    span = words[:, start : -(-last // WORD_CODES)].view("<u4")
    codes = unpack_words(span, BITS)[..., GEMM_ORDER].reshape(len(words), -1)
    return codes[:, first - start * WORD_CODES : last - start * WORD_CODES]


@dataclass(frozen=True, slots=True)
class GemvMatrix:
    """The stored tensors of one matrix in the gemv layout. `size` is the number of neighboring
    inputs in a group.
    """

    qweight: LazyTensor
    qzeros: LazyTensor
    scales: LazyTensor
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        """The rows (outputs) and columns (inputs) of the decoded matrix."""
        return self.qweight.shape[0], self.qweight.shape[1] * WORD_CODES

    def read_rows(self, first: int, last: int) -> "F32":
        """Return rows first .. last of the decoded matrix as float32 `[rows, inputs]`."""
        import numpy as np

        def read_codes(tensor: LazyTensor) -> "F32":
            words = decode_values(tensor.read(first, last), tensor.dtype).view(np.uint32)
            return unpack_words(words, BITS).reshape(last - first, -1).astype(np.float32)

        group = np.arange(self.shape[1]) // self.size
        scales = decode_values(self.scales.read(first, last), self.scales.dtype)
        values: F32 = (read_codes(self.qweight) - read_codes(self.qzeros)[:, group]) * scales[
            :, group
        ].astype(np.float32)
        return values


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with each AWQ matrix (qweight, scales and qzeros) replaced by one float
    matrix, whose name ends in `.weight`. No values are read here.

    Raises UserError for settings and tensors that are not supported.
    """
    values = settings.values
    bits, version = values.get("bits", values.get("w_bit", 4)), values.get("version") or "gemm"
    if bits != BITS:
        raise make_input_error(settings, f"AWQ with {bits!r} bits is not supported; 4 are")
    if not isinstance(version, str) or version.lower() not in LAYOUTS:
        raise make_input_error(
            settings, f"the AWQ version {version!r} is not supported; gemm and gemv are"
        )
    size = values.get("group_size", values.get("q_group_size"))
    return restore_matrices(
        CheckpointConfig({**values, "group_size": size}, settings.location),
        tensors,
        version.lower(),
    )


def restore_matrices(settings: CheckpointConfig, tensors: Tensors, layout: str) -> Tensors:
    """Return the tensors with each AWQ matrix replaced by one float matrix. Raises UserError for
    tensors that do not fit each other and the settings.
    """
    result, cache, small_cache = dict(tensors), LastTensorsCache(), LastTensorsCache(2)
    for name in tensors:
        if not name.endswith(".qweight"):
            continue
        base = name.removesuffix("qweight")
        stored = gptq.pop_tensors(settings, result, base)
        matrix: GemmMatrix | GemvMatrix
        if layout == "gemm":
            size = _check_gemm(settings, base, *stored)
            matrix = GemmMatrix(*stored, size, cache, small_cache)
        else:
            matrix = GemvMatrix(*stored, _check_gemv(settings, base, *stored))
        weight_name = f"{base}weight"
        if weight_name in result:
            raise make_duplicate_error(settings, weight_name)
        result[weight_name] = make_computed_tensor(
            weight_name, matrix.qweight, matrix.shape, matrix.read_rows
        )
    return result


def _check_gemm(
    settings: CheckpointConfig,
    base: str,
    qweight: LazyTensor,
    qzeros: LazyTensor,
    scales: LazyTensor,
) -> int:
    """Return the number of inputs in a group. Raises UserError if the shapes do not fit."""
    inputs, groups, outputs = qweight.shape[0], scales.shape[0], scales.shape[-1]
    if (
        not _are_words_and_scales(qweight, qzeros, scales)
        or qweight.shape != (inputs, outputs // WORD_CODES)
        or qzeros.shape != (groups, outputs // WORD_CODES)
        or outputs % WORD_CODES
    ):
        raise gptq.make_misfit_error(settings, BITS, qweight, qzeros, scales)
    return gptq.find_group_size(settings, base, inputs, groups)


def _check_gemv(
    settings: CheckpointConfig,
    base: str,
    qweight: LazyTensor,
    qzeros: LazyTensor,
    scales: LazyTensor,
) -> int:
    """Return the number of inputs in a group. Raises UserError if the shapes do not fit."""
    outputs, width = qweight.shape[0], qzeros.shape[-1]
    if (
        not _are_words_and_scales(qweight, qzeros, scales)
        or qzeros.shape != (outputs, width)
        or scales.shape != (outputs, width * WORD_CODES)
    ):
        raise gptq.make_misfit_error(settings, BITS, qweight, qzeros, scales)
    return gptq.find_group_size(settings, base, qweight.shape[1] * WORD_CODES, scales.shape[1])


def _are_words_and_scales(qweight: LazyTensor, qzeros: LazyTensor, scales: LazyTensor) -> bool:
    return (
        (qweight.dtype, qzeros.dtype) == ("I32", "I32")
        and scales.dtype in FLOAT_DTYPES
        and len(qweight.shape) == len(scales.shape) == 2
    )


INPUTS = (QuantizedInput("awq", "AWQ", restore),)
