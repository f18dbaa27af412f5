"""Converts a checkpoint's MXFP4 weights, each stored as a tensor of codes and a tensor of scales,
to ggml's MXFP4 blocks.

32 values share a scale, which is a power of two, and one byte contains the codes of two neighboring
values, the first in its low half. A ggml block begins with the scale byte, and each of the
following 16 bytes contains the codes of values i and i + 16. Only bits are moved; no value changes.

Each tool names the two tensors differently: NAME_blocks and NAME_scales in checkpoints with
quant_method mxfp4 (such as gpt-oss), NAME_packed and NAME_scale in compressed-tensors, NAME and
NAME_scale in ModelOpt and Quark.
"""

from typing import TYPE_CHECKING

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized.base import QuantizedInput, make_nan_error
from quant.checkpoint.safetensors import LazyTensor, Tensors

if TYPE_CHECKING:
    from quant.native.ggml import U8

BLOCK_VALUES, CODE_BYTES = 32, 16  # number of values in a block, and of the bytes of their codes
# The largest valid scale byte stands for 2 ** 125: 6 times the next power of two overflows float32,
# and byte 255 is NaN.
MAX_SCALE_BYTE = 252


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with every pair NAME_blocks and NAME_scales replaced by one MXFP4 tensor
    NAME.
    """
    return restore_pairs(tensors, "_blocks", "_scales")


def restore_pairs(tensors: Tensors, codes_ending: str, scales_ending: str) -> Tensors:
    """Return the tensors with every pair of codes and scales replaced by one MXFP4 tensor NAME. The
    names of the two are NAME with these endings.

    All other tensors stay unchanged. These include codes or scales whose partner is missing, pairs
    with wrong shapes or dtypes, and pairs whose NAME is a third tensor. The converter reports them
    as unknown.
    """
    result = dict(tensors)
    for name, codes in tensors.items():
        weight_name = name.removesuffix(codes_ending)
        scales = tensors.get(weight_name + scales_ending)
        if (
            name == weight_name + codes_ending
            and tensors.get(weight_name, codes) is codes
            and scales is not None
            and is_pair(codes, scales)
        ):
            del result[name], result[scales.name]
            result[weight_name] = make_mxfp4_tensor(weight_name, codes, scales)
    return result


def is_pair(codes: LazyTensor, scales: LazyTensor) -> bool:
    """Return whether two tensors are codes of MXFP4 `[..., rows, b, 16]` or `[..., rows, 16 * b]`,
    and their scales `[..., rows, b]`.
    """
    *lead, blocks = scales.shape
    return (
        codes.dtype == "U8"
        and scales.dtype in ("U8", "F8_E8M0")
        and len(lead) > 0
        and codes.shape in ((*scales.shape, CODE_BYTES), (*lead, blocks * CODE_BYTES))
    )


def make_mxfp4_tensor(name: str, codes: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return one MXFP4 tensor of shape [..., rows, 32 * b], made from the codes and scales of a
    pair (see is_pair).

    Reading its rows raises DamagedSourceError if a scale makes NaN or infinite values.
    """
    count = scales.shape[-1]
    spans = count if codes.shape[:-1] == scales.shape else 1

    def read(first: int, last: int) -> "U8":
        scale_bytes = scales.read(first, last)
        if (scale_bytes > MAX_SCALE_BYTE).any():
            raise make_nan_error(scales.name)
        return pack_ggml_rows(codes.read(first * spans, last * spans), scale_bytes)

    shape = (*scales.shape[:-1], count * BLOCK_VALUES)
    return LazyTensor(name, shape, "MXFP4", codes.file, read)


def pack_ggml_rows(codes: "U8", scales: "U8") -> "U8":
    """Return rows of ggml blocks `[rows, 17 * b]`, made from their codes, 16 bytes for each
    block, and scales `[rows, b]`, all U8.

    Byte i of the codes contains value 2i in its low half and value 2i + 1 in its high half. In a
    ggml block, byte i after the scale contains values i and i + 16 (`block_mxfp4`, ggml-common.h).
    For speed, eight bytes are moved at a time.
    """
    import numpy as np

    low, high, half = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(4)
    # values 0 to 15 and values 16 to 31 of every block, as 8-byte words
    first, second = np.ascontiguousarray(codes).reshape(-1, CODE_BYTES).view("<u8").T
    out = np.empty((len(first), 1 + CODE_BYTES), np.uint8)
    out[:, 0] = scales.reshape(-1)
    half_bytes = CODE_BYTES // 2
    out[:, 1::2] = ((first & low) | (second & low) << half).view(np.uint8).reshape(-1, half_bytes)
    out[:, 2::2] = ((first >> half & low) | (second & high)).view(np.uint8).reshape(-1, half_bytes)
    return out.reshape(len(scales), -1)


INPUTS = (QuantizedInput("mxfp4", "MXFP4", restore),)
