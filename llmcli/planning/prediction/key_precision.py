"""Tell from a model's file whether its keys keep their meaning in a cache of few bits.

Qwen2 and Qwen2.5 add a bias to every key. A few of its values are a hundred times as large as the
others: 354 beside 0.7 in Qwen2.5-Coder 1.5B. The largest value of a block sets the step of a
quantized cache, and with 4 bits this step exceeds the other values. llama.cpp rotates the keys of a
quantized cache (src/llama-kv-cache.cpp), which spreads the large values but does not remove them.
docs/quality.md has the figures.
"""

import numpy as np

from llmcli.runtime import kv_size
from quant.gguf.header import TensorInfo
from quant.model_file.model_header import ModelHeader

# The largest bias of a layer's keys, and its ratio to the median, above which few bits lose the keys.
# Qwen2.5-Coder has 354 and 500.
MIN_BIAS, MIN_BIAS_RATIO = 20.0, 20.0
MAX_BIAS_BYTES = 1 << 20  # of a layer; a larger tensor is not read
SAFE_KEY_TYPE = "q8_0"
FIVE_BITS = kv_size.BYTES_PER_32["q5_0"]
FLOAT_TYPES: dict[str, type[np.floating]] = {"F32": np.float32, "F16": np.float16}


def tolerates_few_bits(header: ModelHeader) -> bool:
    """Return whether the keys of a model tolerate a cache type smaller than q8_0: whether none of their
    biases has single large values.
    """
    return not any(
        _has_large_values(tensor)
        for tensor in header.tensors
        if tensor.name.endswith(".attn_k.bias")
    )


def describe_key_loss(header: ModelHeader, type_k: str) -> str:
    """Return a warning if a cache type loses the keys of a model, and otherwise ""."""
    nbytes = kv_size.BYTES_PER_32[type_k]
    if nbytes >= kv_size.BYTES_PER_32[SAFE_KEY_TYPE] or tolerates_few_bits(header):
        return ""
    loss = (
        "loses the others: expect wrong" if nbytes < FIVE_BITS else "blurs the others: expect worse"
    )
    return (
        f"the keys of this model have a few large values, and {type_k} {loss} answers; "
        f"-ctk {SAFE_KEY_TYPE} keeps them (-ctv may be smaller)"
    )


def _has_large_values(tensor: TensorInfo) -> bool:
    """Return whether a few values of a bias are much larger than the others. A bias that cannot be
    read has none.
    """
    if tensor.type not in FLOAT_TYPES or not 0 < tensor.nbytes <= MAX_BIAS_BYTES:
        return False
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        data = stream.read(tensor.nbytes)
    if len(data) != tensor.nbytes:
        return False
    sizes = np.abs(np.frombuffer(data, FLOAT_TYPES[tensor.type]).astype(np.float64))
    if not np.isfinite(sizes).all():
        return False
    largest = float(sizes.max())
    return largest >= MIN_BIAS and largest >= MIN_BIAS_RATIO * float(np.median(sizes))
