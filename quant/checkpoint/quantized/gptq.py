"""GPTQ checkpoints: codes of 2, 4 or 8 bits in int32 words, with a scale and a zero for each group
of inputs (columns of the matrix).

Follows dequant_gptq of llama.cpp (conversion/base.py). Shapes: qweight `[inputs / codes_per_word,
outputs]`, scales `[groups, outputs]`, qzeros `[groups, outputs / codes_per_word]`. g_idx `[inputs]`
has the group of each input.

The older format (gptq) stores each zero minus one, the newer one (gptq_v2) the zero itself.
GPTQModel writes the older format by subtracting one from all zeros of a word in a single
subtraction (convert_gptq_v2_to_v1_format), in which a zero of 0 borrows from the next zero. To undo
this, the ones are added to whole words in files that GPTQModel wrote.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized.base import (
    REFETCH_HINT,
    LastTensorCache,
    QuantizedInput,
    make_computed_tensor,
    make_input_error,
    read_all,
    unpack_words,
)
from quant.checkpoint.safetensors import LazyTensor, Tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native.ggml import F32

SUPPORTED_BITS = (2, 4, 8)
# checkpoint_format -> number that is subtracted from each zero before it is stored
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# Settings that change the meaning of the codes.
UNSUPPORTED_SETTINGS = ("is_marlin_format", "rotation", "adapter")
BAND_CODES = 1 << 20  # number of codes that are unpacked at a time


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """The stored tensors of one quantized matrix, and the settings that are needed to decode them.

    `groups` is the group of each input, `[inputs]`. `zero_offset` is added to each zero after
    unpacking, and `word_offset` to each word of zeros before unpacking. `cache` is shared by all
    matrices of the checkpoint.
    """

    qweight: LazyTensor
    qzeros: LazyTensor
    scales: LazyTensor
    groups: "NDArray[np.int64]"
    bits: int
    zero_offset: int
    word_offset: int
    cache: LastTensorCache

    def read_rows(self, first: int, last: int) -> "F32":
        """Return rows first .. last of the decoded matrix as float32 `[rows, inputs]`. A row
        belongs to one output.

        The inputs are decoded in bands, so that temporary memory does not grow with the matrix.
        """
        import numpy as np

        words = self.cache.read(self.qweight)[:, first:last].view(np.uint32)
        scales = read_all(self.scales)[:, first:last].astype(np.float32)
        zeros = self._zeros(first, last)
        count = 32 // self.bits
        out = np.empty((last - first, len(self.groups)), np.float32)
        step = max(1, BAND_CODES // (count * (last - first)))
        for start in range(0, len(words), step):
            # [words, outputs, codes in a word]
            codes = unpack_words(words[start : start + step], self.bits)
            codes = codes.swapaxes(1, 2).reshape(-1, last - first)
            inputs = slice(start * count, start * count + len(codes))
            group = self.groups[inputs]
            out[:, inputs] = (scales[group] * (codes - zeros[group])).T
        return out

    def _zeros(self, first: int, last: int) -> "F32":
        """Return the zeros of outputs first .. last, `[groups, outputs]`."""
        import numpy as np

        codes = unpack_words(
            read_all(self.qzeros).view(np.uint32) + np.uint32(self.word_offset), self.bits
        )
        zeros: F32 = (
            codes.reshape(len(codes), -1)[:, first:last].astype(np.float32) + self.zero_offset
        )
        return zeros


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
    result, cache, subtracted = dict(tensors), LastTensorCache(), ZERO_OFFSETS[checkpoint_format]
    zero_offset, word_offset = (
        (0, subtracted * sum(1 << at for at in range(0, 32, bits)))
        if _is_from_gptqmodel(settings)
        else (subtracted, 0)
    )
    for name in tensors:
        if name.endswith(".qweight"):
            base = name.removesuffix("qweight")
            matrix_tensors, groups = _pop_matrix(settings, result, base, bits)
            matrix = GptqMatrix(*matrix_tensors, groups, bits, zero_offset, word_offset, cache)
            weight_name = base + "weight"
            if weight_name in result:
                raise make_input_error(
                    settings,
                    f"{weight_name} is stored both as floats and as codes",
                    hint=REFETCH_HINT,
                )
            shape = (matrix.qweight.shape[1], len(matrix.groups))
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


def _pop_matrix(
    settings: CheckpointConfig, tensors: Tensors, base: str, bits: int
) -> "tuple[tuple[LazyTensor, LazyTensor, LazyTensor], NDArray[np.int64]]":
    """Remove the qweight, qzeros, scales and g_idx of one matrix from `tensors`. Return the first
    three, and the group of each input.

    Raises UserError if their shapes do not fit each other and `bits`.
    """
    missing = [base + ending for ending in ("qzeros", "scales") if base + ending not in tensors]
    if missing:
        raise make_input_error(
            settings, f"{base}qweight has no {' and no '.join(missing)}", hint=REFETCH_HINT
        )
    qweight, qzeros, scales = (
        tensors.pop(base + ending) for ending in ("qweight", "qzeros", "scales")
    )
    count, groups = 32 // bits, scales.shape[0]
    outputs = qweight.shape[-1]
    fits = (
        (qweight.dtype, qzeros.dtype) == ("I32", "I32")
        and scales.dtype in ("F16", "BF16", "F32")
        and len(qweight.shape) == 2
        and scales.shape == (groups, outputs)
        and qzeros.shape == (groups, outputs // count)
        and outputs % count == 0
    )
    if not fits:
        listed = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in (qweight, qzeros, scales))
        raise make_input_error(
            settings,
            f"these are not {bits}-bit codes with their zeros and scales: {listed}",
            hint=REFETCH_HINT,
        )
    index = _groups(
        settings, tensors.pop(base + "g_idx", None), base, qweight.shape[0] * count, groups
    )
    return (qweight, qzeros, scales), index


def _groups(
    settings: CheckpointConfig, g_idx: LazyTensor | None, base: str, inputs: int, groups: int
) -> "NDArray[np.int64]":
    """Return the group of each input, `[inputs]`, as g_idx lists it. Without g_idx, groups are
    `group_size` neighboring inputs. Raises UserError for malformed groups.
    """
    import numpy as np

    if g_idx is None:
        size = settings.values.get("group_size")
        if type(size) is not int or not (size == -1 or size > 0):
            raise make_input_error(
                settings,
                f"group_size is {size!r}, and {base}qweight has no g_idx",
                hint=REFETCH_HINT,
            )
        index = np.arange(inputs) // (inputs if size == -1 else min(size, inputs))
    elif g_idx.dtype not in ("I32", "I64") or g_idx.shape != (inputs,):
        raise make_input_error(
            settings,
            f"{g_idx.name} is {g_idx.dtype} {list(g_idx.shape)}, not a group for each of "
            f"{inputs} inputs",
            hint=REFETCH_HINT,
        )
    else:
        index = read_all(g_idx).astype(np.int64)
    if index.min() < 0 or index.max() >= groups:
        raise make_input_error(
            settings, f"{base}qweight uses groups beyond its {groups} scales", hint=REFETCH_HINT
        )
    return index


INPUTS = (QuantizedInput("gptq", "GPTQ", restore),)
