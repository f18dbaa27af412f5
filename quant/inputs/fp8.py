"""FP8 checkpoints: weights as eight-bit floats, with one scale a block, a row or a tensor.

Follows dequant_model of llama.cpp (conversion/base.py): a value is its eight bits times its scale,
whatever the scale is called. Scales of activations are left out: nothing here computes in FP8.
"""

from typing import TYPE_CHECKING

from quant.archs.base import Config, Tensors
from quant.inputs.base import Input, computed, numbers, refuse, whole
from quant.tensors import LazyTensor

if TYPE_CHECKING:
    from quant.native import F32

CODES = ("F8_E4M3", "F8_E5M2")
# Ending of a scale -> ending of the tensor it belongs to.
SCALES = {"_scale_inv": "", "_scale": "", ".qscale_weight": ".weight"}
ACTIVATIONS = (
    ".input_scale",
    ".input_scale_ub",
    ".activation_scale",
    "_activation_scale",
    ".qscale_act",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
)


def restore(settings: Config, tensors: Tensors) -> Tensors:
    """Every eight-bit tensor times its scale; one without a scale stays, and is told as it is
    stored.
    """
    if settings.values.get("quant_algo") not in (None, "FP8"):
        raise refuse(settings, f"{settings.values['quant_algo']} is not undone here, FP8 is")
    block = settings.values.get("weight_block_size")
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATIONS)}
    for name, tensor in list(found.items()):
        if tensor.dtype not in CODES:
            continue
        for ending, own in SCALES.items():
            scale = found.get(name.removesuffix(own) + ending) if name.endswith(own) else None
            if scale is not None:
                found[name] = scaled(settings, tensor, scale, block)
                del found[scale.name]
                break
    return found


def scaled(
    settings: Config,
    tensor: LazyTensor,
    scale: LazyTensor,
    block: object = None,
    zero: LazyTensor | None = None,
) -> LazyTensor:
    """`tensor` times `scale`: one number, one a row [.., rows, 1] or one a block of `block` [rows,
    columns].

    `zero`, of the scale's shape, is taken off before.
    """
    height, width = _block(settings, tensor, scale, block)
    rows, columns = tensor.shape[-2:] if len(tensor.shape) > 1 else (1, tensor.shape[-1])
    down, across = -(-rows // height), -(-columns // width)

    def read(first: int, last: int) -> "F32":
        import numpy as np

        row = np.arange(first, last)

        def spread(tensor: LazyTensor) -> "F32":  # [rows, columns] of what stands once for a block
            blocks = whole(tensor).astype(np.float32).reshape(-1, down, across)
            chosen = blocks[row // rows % len(blocks), row % rows // height]
            wide: F32 = chosen if across == 1 else np.repeat(chosen, width, axis=1)[:, :columns]
            return wide

        values: F32 = numbers(tensor.read(first, last), tensor.dtype).astype(np.float32, copy=False)
        if zero is not None:
            values = values - spread(zero)
        return np.multiply(values, spread(scale), out=values)

    return computed(tensor.name, tensor, tensor.shape, read)


def _block(
    settings: Config, tensor: LazyTensor, scale: LazyTensor, block: object
) -> tuple[int, int]:
    """How many rows and columns share a scale; the scale's shape must say the same as the settings."""
    if len(tensor.shape) < 2:
        raise refuse(settings, f"{tensor.name} is {list(tensor.shape)}: only matrices have scales")
    (rows, columns), before = tensor.shape[-2:], tensor.shape[:-2]
    if scale.dtype not in ("F32", "F16", "BF16", "F8_E8M0"):
        raise refuse(settings, f"{scale.name} is stored as {scale.dtype}, not as floats")
    options = {(1,): (rows, columns), before: (rows, columns), (*before, 1, 1): (rows, columns)}
    options |= {(*before, rows): (1, columns), (*before, rows, 1): (1, columns)}
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        height, width = min(block[0], rows), min(block[1], columns)
        options[(*before, -(-rows // height), -(-columns // width))] = (height, width)
    if scale.shape not in options:
        raise refuse(
            settings,
            f"{scale.name} is {list(scale.shape)}, which does not fit {tensor.name} {list(tensor.shape)}"
            + (f" in blocks of {block}" if block else ""),
            hint="fetch the whole model again",
        )
    return options[scale.shape]


INPUTS = (
    Input("fp8", "FP8", restore),
    Input("fbgemm_fp8", "FP8", restore),
    Input("modelopt", "FP8", restore),
)
