"""GPTQ checkpoints: codes of 2, 4 or 8 bits in int32 words, with a scale and a zero for each group
of inputs (columns of the matrix).

Follows dequant_gptq of llama.cpp (conversion/base.py). Shapes: qweight `[inputs * bits / 32,
outputs]`, scales `[groups, outputs]`, qzeros `[groups, outputs * bits / 32]`. g_idx `[inputs]` has
the group of each input.

The older format (gptq) stores each zero minus one, the newer one (gptq_v2) the zero itself.
GPTQModel writes the older format by subtracting one from all zeros of a word in a single
subtraction (convert_gptq_v2_to_v1_format), in which a zero of 0 borrows from the next zero. To undo
this, the ones are added to whole words in files that GPTQModel wrote.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized.base import (
    REFETCH_HINT,
    LastTensorsCache,
    QuantizedInput,
    make_computed_tensor,
    make_duplicate_error,
    make_input_error,
    matrix_kind,
    unpack_stream,
    unpack_words,
)
from quant.checkpoint.safetensors import FLOAT_DTYPES, LazyTensor, Tensors
from quant.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32, U8

SUPPORTED_BITS = (2, 4, 8)
# checkpoint_format -> number that is subtracted from each zero before it is stored
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# Settings that change the meaning of the codes.
UNSUPPORTED_SETTINGS = ("is_marlin_format", "rotation", "adapter")
BAND_CODES = 1 << 20  # number of codes that are unpacked at a time


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """The stored tensors of one quantized matrix, and the settings that are needed to decode them.

    `groups()` returns the group of each input, `[inputs]`. `zero_offset` is added to each zero
    after unpacking, and `word_offset` to each word of zeros before unpacking. `cache` and
    `small_cache` are shared by all matrices of the checkpoint.
    """

    qweight: LazyTensor
    qzeros: LazyTensor
    scales: LazyTensor
    groups: "Callable[[], NDArray[np.int64]]"
    bits: int
    zero_offset: int
    word_offset: int
    cache: LastTensorsCache
    small_cache: LastTensorsCache

    @property
    def inputs(self) -> int:
        """Number of inputs, which are the columns of the decoded matrix."""
        return self.qweight.shape[0] * 32 // self.bits

    def read_rows(self, first: int, last: int) -> "F32":
        """Return rows first .. last of the decoded matrix as float32 `[rows, inputs]`. A row
        belongs to one output.

        The inputs are decoded in bands, so that temporary memory does not grow with the matrix.
        """
        import numpy as np

        words = self.cache.read(self.qweight)[:, first:last].view(np.uint32)
        scales = self.small_cache.read(self.scales)[:, first:last].astype(np.float32)
        zeros, groups = self._zeros(first, last), self.groups()
        out = np.empty((last - first, self.inputs), np.float32)
        # 32 codes take `bits` words, whether or not a code is split over two words
        step = self.bits * max(1, BAND_CODES // (32 * (last - first)))
        for start in range(0, len(words), step):
            codes = self._codes(words[start : start + step].T).T  # [inputs, outputs]
            at = start * 32 // self.bits
            group = groups[at : at + len(codes)]
            out[:, at : at + len(codes)] = (scales[group] * (codes - zeros[group])).T
        return out

    def _zeros(self, first: int, last: int) -> "F32":
        """Return the zeros of outputs first .. last, `[groups, outputs]`."""
        import numpy as np

        words = self.small_cache.read(self.qzeros).view(np.uint32) + np.uint32(self.word_offset)
        zeros: F32 = self._codes(words)[:, first:last].astype(np.float32) + self.zero_offset
        return zeros

    def _codes(self, words: "NDArray[np.uint32]") -> "U8":
        """Return the codes in rows of words `[rows, words]`, uint8 `[rows, codes]`."""
        if 32 % self.bits:
            return unpack_stream(words, self.bits)
        return unpack_words(words, self.bits).reshape(len(words), -1)


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with each GPTQ matrix (qweight, scales, qzeros and g_idx) replaced by one
    float matrix, whose name ends in `.weight`.

    Raises UserError for settings and tensors that are not supported.
    """
    bits, checkpoint_format = (
        settings.values.get("bits"),
        settings.values.get("checkpoint_format") or "gptq",
    )
    if type(bits) is not int or bits not in SUPPORTED_BITS:
        raise make_input_error(
            settings, f"GPTQ with {bits!r} bits is not supported; 2, 4 and 8 are"
        )
    if not isinstance(checkpoint_format, str) or checkpoint_format not in ZERO_OFFSETS:
        raise make_input_error(
            settings,
            f"the GPTQ format {checkpoint_format!r} is not supported; gptq and gptq_v2 are",
        )
    if unsupported := [key for key in UNSUPPORTED_SETTINGS if settings.values.get(key)]:
        raise make_input_error(settings, f"GPTQ with {' and '.join(unsupported)} is not supported")
    subtracted = ZERO_OFFSETS[checkpoint_format]
    zero_offset, word_offset = (
        (0, subtracted * sum(1 << at for at in range(0, 32, bits)))
        if _is_from_gptqmodel(settings)
        else (subtracted, 0)
    )
    return restore_matrices(settings, tensors, lambda _: bits, zero_offset, word_offset)


def restore_matrices(
    settings: CheckpointConfig,
    tensors: Tensors,
    find_bits: Callable[[str], int],
    zero_offset: int,
    word_offset: int = 0,
) -> Tensors:
    """Return the tensors with each GPTQ matrix replaced by one float matrix. `find_bits(base)`
    returns the bits of the codes in the tensor `base` + "qweight". For the offsets, see GptqMatrix.

    The g_idx of one matrix of each kind is read and checked here, the others with the rows. Raises
    UserError for tensors that are not supported.
    """
    result, cache, small_cache = dict(tensors), LastTensorsCache(), LastTensorsCache(4)
    known_kinds = set()
    for name in tensors:
        if name.endswith(".qweight"):
            base = name.removesuffix("qweight")
            bits = find_bits(base)
            stored, groups = _pop_matrix(settings, result, base, bits, small_cache)
            kind = matrix_kind(base, *stored)
            if kind not in known_kinds:
                known_kinds.add(kind)
                groups()
            matrix = GptqMatrix(*stored, groups, bits, zero_offset, word_offset, cache, small_cache)
            weight_name = base + "weight"
            if weight_name in result:
                raise make_duplicate_error(settings, weight_name)
            shape = (matrix.qweight.shape[1], matrix.inputs)
            result[weight_name] = make_computed_tensor(
                weight_name, matrix.qweight, shape, matrix.read_rows
            )
    return result


def _is_from_gptqmodel(settings: CheckpointConfig) -> bool:
    """Return whether GPTQModel wrote the checkpoint, according to the program name in its `meta`
    settings.
    """
    meta = settings.values.get("meta")
    return isinstance(meta, dict) and "gptqmodel:" in str(meta.get("quantizer")).lower()


def pop_tensors(
    settings: CheckpointConfig, tensors: Tensors, base: str
) -> tuple[LazyTensor, LazyTensor, LazyTensor]:
    """Remove the qweight, qzeros and scales of one matrix from `tensors`, and return them. Raises
    UserError if one is missing.
    """
    missing = [base + ending for ending in ("qzeros", "scales") if base + ending not in tensors]
    if missing:
        raise make_input_error(
            settings, f"{base}qweight has no {' and no '.join(missing)}", hint=REFETCH_HINT
        )
    return tensors.pop(f"{base}qweight"), tensors.pop(f"{base}qzeros"), tensors.pop(f"{base}scales")


def make_misfit_error(settings: CheckpointConfig, bits: int, *stored: LazyTensor) -> UserError:
    """Return the error that tensors are not codes of `bits` bits with their zeros and scales."""
    listed = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in stored)
    return make_input_error(
        settings,
        f"these are not {bits}-bit codes with their zeros and scales: {listed}",
        hint=REFETCH_HINT,
    )


def _pop_matrix(
    settings: CheckpointConfig,
    tensors: Tensors,
    base: str,
    bits: int,
    small_cache: LastTensorsCache,
) -> "tuple[tuple[LazyTensor, LazyTensor, LazyTensor], Callable[[], NDArray[np.int64]]]":
    """Remove the qweight, qzeros, scales and g_idx of one matrix from `tensors`. Return the first
    three, and a function that returns the group of each input.

    Raises UserError if their shapes do not fit each other and `bits`.
    """
    stored = qweight, qzeros, scales = pop_tensors(settings, tensors, base)
    groups, outputs = scales.shape[0], qweight.shape[-1]
    fits = (
        (qweight.dtype, qzeros.dtype) == ("I32", "I32")
        and scales.dtype in FLOAT_DTYPES
        and len(qweight.shape) == 2
        and qweight.shape[0] * 32 % bits == 0
        and scales.shape == (groups, outputs)
        and qzeros.shape == (groups, outputs * bits // 32)
        and outputs * bits % 32 == 0
    )
    if not fits:
        raise make_misfit_error(settings, bits, *stored)
    g_idx = tensors.pop(base + "g_idx", None)
    inputs = qweight.shape[0] * 32 // bits
    if g_idx is not None and (g_idx.dtype not in ("I32", "I64") or g_idx.shape != (inputs,)):
        raise make_input_error(
            settings,
            f"{g_idx.name} is {g_idx.dtype} {list(g_idx.shape)}, not a group for each of "
            f"{inputs} inputs",
            hint=REFETCH_HINT,
        )
    size = find_group_size(settings, base, inputs, groups) if g_idx is None else 0

    def find_groups() -> "NDArray[np.int64]":
        import numpy as np

        index = np.arange(inputs) // size if g_idx is None else small_cache.read(g_idx)
        if index.min() < 0 or index.max() >= groups:
            raise _make_group_error(settings, base, groups)
        return index.astype(np.int64, copy=False)

    return stored, find_groups


def find_group_size(settings: CheckpointConfig, base: str, inputs: int, groups: int) -> int:
    """Return the number of neighboring inputs that share a scale, according to the settings. Raises
    UserError if `groups` scales are too few.
    """
    size = settings.values.get("group_size")
    if type(size) is not int or not (size == -1 or size > 0):
        raise make_input_error(
            settings, f"group_size is {size!r}, and {base}qweight has no g_idx", hint=REFETCH_HINT
        )
    size = inputs if size == -1 else min(size, inputs)
    if -(-inputs // size) > groups:
        raise _make_group_error(settings, base, groups)
    return size


def _make_group_error(settings: CheckpointConfig, base: str, groups: int) -> UserError:
    return make_input_error(
        settings, f"{base}qweight uses groups beyond its {groups} scales", hint=REFETCH_HINT
    )


INPUTS = (QuantizedInput("gptq", "GPTQ", restore),)
