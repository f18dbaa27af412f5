"""GPTQ checkpoints: codes of 2, 4 or 8 bits in int32 words, transposed, with a scale and a zero a
group of inputs.

Follows dequant_gptq of llama.cpp (conversion/base.py). qweight is [inputs / codes a word, outputs],
scales [groups, outputs], qzeros [groups, outputs / codes a word]; g_idx names the group of each
input. The older form of the checkpoint (gptq) stores zeros less one, the newer (gptq_v2) as they
are. GPTQModel takes the one from whole words (convert_gptq_v2_to_v1_format), so that a zero of 0
borrows from the next: its words are added to.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.archs.base import Config, Tensors
from quant.inputs.base import Input, Recent, computed, refuse, unpacked, whole
from quant.tensors import LazyTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native import F32

BITS = (2, 4, 8)
ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}  # by checkpoint_format
STRANGE = (
    "is_marlin_format",
    "rotation",
    "adapter",
)  # settings under which the codes mean something else
BAND = 1 << 20  # codes widened at a time
AGAIN = "fetch the whole model again"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One quantized matrix's tensors, and what all of them share.

    `groups` is the group of each input; `offset` is added to the zeros, `carried` to the words that
    they are in.
    """

    qweight: LazyTensor
    qzeros: LazyTensor
    scales: LazyTensor
    groups: "NDArray[np.int64]"
    bits: int
    offset: int
    carried: int
    recent: Recent

    def rows(self, first: int, last: int) -> "F32":
        """Rows of outputs [rows, inputs]; temporaries are a band of inputs, whatever the matrix."""
        import numpy as np

        words = self.recent.get(self.qweight)[:, first:last].view(np.uint32)
        scales = whole(self.scales)[:, first:last].astype(np.float32)
        zeros = self._zeros(first, last)
        count = 32 // self.bits
        out = np.empty((last - first, len(self.groups)), np.float32)
        step = max(1, BAND // (count * (last - first)))
        for start in range(0, len(words), step):
            codes = unpacked(
                words[start : start + step], self.bits
            )  # [words, outputs, codes a word]
            codes = codes.swapaxes(1, 2).reshape(-1, last - first)
            inputs = slice(start * count, start * count + len(codes))
            group = self.groups[inputs]
            out[:, inputs] = (scales[group] * (codes - zeros[group])).T
        return out

    def _zeros(self, first: int, last: int) -> "F32":
        """The zeros of outputs [groups, outputs]."""
        import numpy as np

        codes = unpacked(whole(self.qzeros).view(np.uint32) + np.uint32(self.carried), self.bits)
        zeros: F32 = codes.reshape(len(codes), -1)[:, first:last].astype(np.float32) + self.offset
        return zeros


def restore(settings: Config, tensors: Tensors) -> Tensors:
    """Every qweight with its companions as one float matrix `.weight`."""
    bits, form = settings.values.get("bits"), settings.values.get("checkpoint_format") or "gptq"
    if type(bits) is not int or bits not in BITS:
        raise refuse(settings, f"GPTQ with {bits!r} bits is not undone here; 2, 4 and 8 are")
    if not isinstance(form, str) or form not in ZERO_OFFSET:
        raise refuse(settings, f"the GPTQ format {form!r} is not undone here; gptq and gptq_v2 are")
    if strange := [key for key in STRANGE if settings.values.get(key)]:
        raise refuse(settings, f"GPTQ with {' and '.join(strange)} is not undone here")
    found, recent, less = dict(tensors), Recent(), ZERO_OFFSET[form]
    offset, carried = (
        (0, less * sum(1 << at for at in range(0, 32, bits))) if _by_words(settings) else (less, 0)
    )
    for name in tensors:
        if name.endswith(".qweight"):
            base = name.removesuffix("qweight")
            parts, groups = _matrix(settings, found, base, bits)
            matrix = Matrix(*parts, groups, bits, offset, carried, recent)
            own = base + "weight"
            if own in found:
                raise refuse(settings, f"{own} is there as floats and as codes", hint=AGAIN)
            shape = (matrix.qweight.shape[1], len(matrix.groups))
            found[own] = computed(own, matrix.qweight, shape, matrix.rows)
    return found


def _by_words(settings: Config) -> bool:
    """Whether GPTQModel made it: `meta` names the program and its version."""
    meta = settings.values.get("meta")
    return isinstance(meta, dict) and "gptqmodel:" in str(meta.get("quantizer")).lower()


def _matrix(
    settings: Config, found: Tensors, base: str, bits: int
) -> "tuple[tuple[LazyTensor, LazyTensor, LazyTensor], NDArray[np.int64]]":
    """qweight, qzeros and scales taken out of `found`, and the group of each input.

    Their shapes must agree with one another and with the bits.
    """
    missing = [base + part for part in ("qzeros", "scales") if base + part not in found]
    if missing:
        raise refuse(settings, f"{base}qweight has no {' and no '.join(missing)}", hint=AGAIN)
    qweight, qzeros, scales = (found.pop(base + part) for part in ("qweight", "qzeros", "scales"))
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
        told = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in (qweight, qzeros, scales))
        raise refuse(
            settings,
            f"these are no codes of {bits} bits with their zeros and scales: {told}",
            hint=AGAIN,
        )
    index = _groups(
        settings, found.pop(base + "g_idx", None), base, qweight.shape[0] * count, groups
    )
    return (qweight, qzeros, scales), index


def _groups(
    settings: Config, g_idx: LazyTensor | None, base: str, inputs: int, groups: int
) -> "NDArray[np.int64]":
    """The group of each input: as g_idx says, else one after another by group_size."""
    import numpy as np

    if g_idx is None:
        size = settings.values.get("group_size")
        if type(size) is not int or not (size == -1 or size > 0):
            raise refuse(
                settings, f"group_size is {size!r}, and {base}qweight has no g_idx", hint=AGAIN
            )
        index = np.arange(inputs) // (inputs if size == -1 else min(size, inputs))
    elif g_idx.dtype not in ("I32", "I64") or g_idx.shape != (inputs,):
        raise refuse(
            settings,
            f"{g_idx.name} is {g_idx.dtype} {list(g_idx.shape)}, not a group for each of {inputs} inputs",
            hint=AGAIN,
        )
    else:
        index = whole(g_idx).astype(np.int64)
    if index.min() < 0 or index.max() >= groups:
        raise refuse(
            settings, f"{base}qweight names groups that its {groups} scales do not have", hint=AGAIN
        )
    return index


INPUTS = (Input("gptq", "GPTQ", restore),)
