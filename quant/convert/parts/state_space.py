"""State-space layers of Mamba 2: their widths, metadata keys, tensor shapes and transformations.

Follows Mamba2Model of llama.cpp (conversion/mamba.py) and build_mamba2_layer
(src/models/mamba-base.cpp). llama.cpp stores the decay A itself instead of its logarithm, A and D
as columns, the convolution without its middle axis, and the norm with one row for each group.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.parts.base import ArchKey, Shapes

if TYPE_CHECKING:
    from quant.native.ggml import F32

MIXER_NAME = re.compile(
    r"(.+\.(?:mamba|mixer)\.)(A_log|D|dt_bias|conv1d\.weight|norm\.weight)", re.DOTALL
)
# The kinds of layers under the names of all versions of transformers.
RECURRENT_KINDS = ("linear_attention", "mamba")
ATTENTION_KINDS = ("full_attention", "attention")

# transformers 5 writes infinity as an object.
UNLIMITED_STEPS = (None, [0, math.inf], (0, math.inf), [0, {"__float__": "Infinity"}])


@dataclass(frozen=True, slots=True)
class Mamba2Widths:
    """Widths of a state-space layer.

    `inner` values in `heads` heads; each head has a state of `state` values for each of its values.
    The heads of a group share the projections B and C. `kernel` is the length of the convolution.
    """

    inner: int
    state: int
    groups: int
    heads: int
    kernel: int

    @property
    def convolved(self) -> int:
        """The number of channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


def width_problems(widths: Mamba2Widths) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of widths that do not divide into heads or groups."""
    return [
        (
            widths.inner % widths.heads,
            f"its state-space layers have {widths.inner} values for {widths.heads} heads",
        ),
        (
            widths.inner % widths.groups or widths.heads % widths.groups,
            f"its state-space layers have {widths.groups} groups for {widths.heads} heads of "
            f"{widths.inner} values",
        ),
        (widths.kernel < 2, "the convolution of its state-space layers has a kernel of 1"),
    ]


def problem_step_limit(config: CheckpointConfig) -> tuple[object, str]:
    """Return the problem (condition, text) that the time steps of state-space layers are limited.
    llama.cpp does not limit them.
    """
    limit = config.values.get("time_step_limit")
    return limit not in UNLIMITED_STEPS, f"its time_step_limit is {limit}"


def state_keys(widths: Mamba2Widths) -> list[ArchKey]:
    """Return the metadata keys of the state-space layers."""
    return [
        ArchKey("ssm.conv_kernel", "uint32", widths.kernel),
        ArchKey("ssm.inner_size", "uint32", widths.inner),
        ArchKey("ssm.state_size", "uint32", widths.state),
        ArchKey("ssm.time_step_rank", "uint32", widths.heads),
        ArchKey("ssm.group_count", "uint32", widths.groups),
    ]


def state_shapes(widths: Mamba2Widths, hidden: int, has_bias: bool) -> Shapes:
    """Return the shapes of one state-space layer, by role. With `has_bias`, the convolution has a
    bias.
    """
    biases: Shapes = {"ssm_conv1d.bias": (widths.convolved,)} if has_bias else {}
    return biases | {
        "ssm_in.weight": (widths.inner + widths.convolved + widths.heads, hidden),
        "ssm_conv1d.weight": (widths.convolved, widths.kernel),
        "ssm_dt.bias": (widths.heads,),
        "ssm_a": (widths.heads, 1),
        "ssm_d": (widths.heads, 1),
        "ssm_norm.weight": (widths.groups, widths.inner // widths.groups),
        "ssm_out.weight": (hidden, widths.inner),
    }


def zero_biases(widths: Mamba2Widths, layers: Iterable[int]) -> "dict[str, F32]":
    """Return biases of zero for the convolutions of these layers. llama.cpp crashes without a
    bias.
    """
    import numpy as np

    return {
        f"blk.{layer}.ssm_conv1d.bias": np.zeros(widths.convolved, np.float32) for layer in layers
    }


def prepare_mixers(groups: int, tensors: Tensors) -> Tensors:
    """Return the tensors with those of the state-space layers as llama.cpp stores them, under
    names that the gguf package knows. The norm gets `groups` rows.

    Tensors of an unexpected shape stay unchanged and are reported later.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        match = MIXER_NAME.fullmatch(name)
        if match is None:
            result[name] = tensor
        elif match[2] == "dt_bias":
            result[f"{match[1]}dt_proj.bias"] = tensor
        else:
            result[name] = _prepare(match[2], groups, tensor)
    return result


def _prepare(kind: str, groups: int, tensor: LazyTensor) -> LazyTensor:
    """Return a tensor of a state-space layer as llama.cpp stores it. `kind` is the end of its
    name.
    """
    if kind == "conv1d.weight":
        return squeeze_kernel(tensor)
    if len(tensor.shape) != 1:
        return tensor
    if kind == "norm.weight":
        return tensor if tensor.shape[0] % groups else tensor_views.split_vector(tensor, groups)
    column = tensor_views.split_vector(tensor, tensor.shape[0])
    return negate_exp(column) if kind == "A_log" else column


def squeeze_kernel(tensor: LazyTensor) -> LazyTensor:
    """Return the convolution `[channels, 1, kernel]` as `[channels, kernel]`. A tensor of another
    shape stays unchanged.
    """
    if len(tensor.shape) != 3 or tensor.shape[1] != 1:
        return tensor
    return tensor_views.reshape(tensor, tensor.shape[0], tensor.shape[2])


def negate_exp(tensor: LazyTensor) -> LazyTensor:
    """Return the F32 tensor -exp(values): the decay A of its stored logarithm."""
    return tensor_views.map_values(tensor, _negate_exp)


def _negate_exp(values: "F32") -> "F32":
    import numpy as np

    with np.errstate(over="ignore"):
        result: F32 = -np.exp(values)
    return result
