"""MXFP4 weights of a checkpoint, codes and scales in two tensors, as ggml's blocks of the same
values.

The format is that of gpt-oss: 32 values share a power of two, two codes a byte, neighbours
together. ggml wants the scale in front and values i and i + 16 together. No value changes. It knows
no family.
"""

from typing import TYPE_CHECKING

from quant.archs.base import Config, Tensors
from quant.errors import Refusal
from quant.inputs.base import Input
from quant.tensors import LazyTensor

if TYPE_CHECKING:
    from quant.native import U8

VALUES, CODES = 32, 16  # of a block: values, bytes of codes
LARGEST = 252  # scale byte of 2 ** 125; 6 times 2 ** 126 is no float32 any more, and 255 is NaN
BLOCKS, SCALES = "_blocks", "_scales"


def restore(settings: Config, tensors: Tensors) -> Tensors:
    """The tensors with every NAME_blocks and NAME_scales replaced by one MXFP4 tensor NAME.

    Pairs that are none (one is missing, shapes or dtypes do not fit, NAME is there) are left for
    the error that lists strangers.
    """
    found = dict(tensors)
    for name, codes in tensors.items():
        own = name.removesuffix(BLOCKS)
        scales = tensors.get(own + SCALES)
        if own not in tensors and scales is not None and _fit(codes, scales):
            del found[codes.name], found[scales.name]
            found[own] = blocks(own, codes, scales)
    return found


def _fit(codes: LazyTensor, scales: LazyTensor) -> bool:
    return (
        codes.dtype == scales.dtype == "U8"
        and codes.shape == (*scales.shape, CODES)
        and len(scales.shape) > 1
    )


def blocks(name: str, codes: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """One MXFP4 tensor [..., rows, 32 b] of `codes` [..., rows, b, 16] and `scales` [..., rows, b],
    both U8.
    """
    count = scales.shape[-1]

    def read(first: int, last: int) -> "U8":
        shared = scales.read(first, last)
        if (shared > LARGEST).any():
            raise Refusal(
                f"tensor {scales.name} holds NaN or infinite values",
                hint="it is damaged: fetch it again",
            )
        return packed(codes.read(first * count, last * count), shared)

    return LazyTensor(name, (*scales.shape[:-1], count * VALUES), "MXFP4", codes.file, read)


def packed(codes: "U8", scales: "U8") -> "U8":
    """ggml's rows [rows, 17 b] of codes [rows * b, 16] and scales [rows, b].

    Byte i of the codes holds value 2i in its low half and 2i + 1 in its high half; in ggml's block
    byte i of 16 holds value i and value i + 16, behind the scale (`block_mxfp4`, ggml-common.h).
    Eight bytes go at a time.
    """
    import numpy as np

    low, high, half = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(4)
    first, second = (
        np.ascontiguousarray(codes).view("<u8").T
    )  # values 0 … 15 and 16 … 31 of every block
    out = np.empty((len(codes), 1 + CODES), np.uint8)
    out[:, 0] = scales.reshape(-1)
    out[:, 1::2] = ((first & low) | (second & low) << half).view(np.uint8).reshape(-1, CODES // 2)
    out[:, 2::2] = ((first >> half & low) | (second & high)).view(np.uint8).reshape(-1, CODES // 2)
    return out.reshape(len(scales), -1)


INPUTS = (Input("mxfp4", "MXFP4", restore, native=True),)
