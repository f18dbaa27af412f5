"""The weights of a model that are multiplied with the activations of several tokens at once."""

import re

from quant.gguf.header import TensorInfo
from quant.model_file.model_header import ModelHeader

# kernels of convolutions over time, which are computed channel by channel
CONVOLUTION = re.compile(r"blk\.\d+\.(ssm_conv1d|shortconv\.conv)")
FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
# Embedding tables. Their rows are copied, not multiplied.
LOOKUP_TENSORS = ("token_embd.weight", "position_embd.weight", "token_types.weight")


def float_weights(header: ModelHeader) -> list[TensorInfo]:
    """Return the weights of matrix products that are floats. llama.cpp computes such a product of
    one token with another kernel than that of several, and the sums differ in their last bits.
    """
    return [tensor for tensor in multiplied_weights(header) if tensor.type in FLOAT_TYPES]


def multiplied_weights(header: ModelHeader) -> list[TensorInfo]:
    """Return the weights of matrix products. The token embeddings are one if the file has no
    separate output matrix.
    """
    is_tied = not any(tensor.name == "output.weight" for tensor in header.tensors)
    return [
        tensor
        for tensor in header.tensors
        if tensor.name.endswith(".weight")
        and sum(size > 1 for size in tensor.shape) > 1
        and not CONVOLUTION.match(tensor.name)
        and (tensor.name not in LOOKUP_TENSORS or (is_tied and tensor.name == LOOKUP_TENSORS[0]))
    ]
