"""The cost of one token: how many bytes must be read, and how many operations are needed. Computed
from the file's header and the depth, which is the number of preceding tokens.

Weights count with their size in the file. Of a lookup table such as the embedding only one row
counts, unless the table is also the output head. Of the experts only those count that a token uses.
The KV cache is that of the preceding tokens; layers with a sliding window read at most the window.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmcli.runtime import kv_size
from quant.gguf.header import TensorInfo
from quant.model_file.model_header import ModelHeader

LOOKUP_TENSORS = (
    "token_embd.weight",
    "per_layer_token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
)
EXPERT_MARK = "_exps."


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of one token. A multiplication with its addition counts as two operations.

    `weight_bytes`: by tensor type. `kv_bytes`: bytes of the KV cache, None: unknown.
    `weight_operations`: operations on weights, including those of the output head
    (`head_operations`). `attention_operations`: operations in attention, None: unknown.
    `has_routed_experts`: each token uses only some of the experts.
    """

    weight_bytes: Mapping[str, int]
    kv_bytes: int | None
    weight_operations: int
    head_operations: int
    attention_operations: int | None
    has_routed_experts: bool = False

    @property
    def nbytes(self) -> int | None:
        """All bytes that must be read for the token; None: unknown."""
        return None if self.kv_bytes is None else sum(self.weight_bytes.values()) + self.kv_bytes

    @property
    def intensity(self) -> float | None:
        """Operations per byte, if a single sequence is generated; None: unknown."""
        if self.nbytes is None or self.attention_operations is None:
            return None
        return (self.weight_operations + self.attention_operations) / self.nbytes


def token_cost(
    header: ModelHeader, depth: int, type_k: str = "f16", type_v: str = "f16"
) -> TokenCost:
    """Return the cost of a token that follows `depth` others."""
    read: dict[str, int] = {}
    n_values = head = 0
    names = {tensor.name for tensor in header.tensors}
    expert_share = _used(header)
    for tensor in header.tensors:
        share = _share(tensor, names, expert_share, header)
        read[tensor.type] = read.get(tensor.type, 0) + int(tensor.nbytes * share)
        if len(tensor.shape) > 1 and share and not _lookup(tensor, names):
            n_values += int(tensor.elements * share)
            head += tensor.elements if tensor.name in ("output.weight", "token_embd.weight") else 0
    cache_shape = kv_size.read_shape(header.metadata)
    if cache_shape is None:
        return TokenCost(read, None, 2 * n_values, 2 * head, None, expert_share < 1)
    heads = header.get_int("attention.head_count") or 0
    cells = [
        min(depth, cache_shape.window) if windowed and cache_shape.window else depth
        for windowed in cache_shape.is_windowed
    ]
    nbytes = sum(
        n * (kv_size.row_bytes(type_k, k) + kv_size.row_bytes(type_v, v))
        for n, k, v in zip(cells, cache_shape.k_values, cache_shape.v_values, strict=True)
    )
    attention = sum(
        2 * n * heads * (k + v)
        for n, k, v in zip(cells, cache_shape.k_heads, cache_shape.v_heads, strict=False)
    )
    return TokenCost(read, nbytes, 2 * n_values, 2 * head, attention, expert_share < 1)


def prompt_operations(header: ModelHeader, tokens: int) -> int | None:
    """Return the number of operations of a prompt: all weights for each token, the output head for
    the last token only, and attention to the preceding tokens. None: unknown.
    """
    last = token_cost(header, tokens // 2)
    if last.attention_operations is None:
        return None
    return (
        tokens * (last.weight_operations - last.head_operations + last.attention_operations)
        + last.head_operations
    )


def _used(header: ModelHeader) -> float:
    """Return the fraction of the experts that a token uses; 1 for a model without experts."""
    count, used = header.get_int("expert_count"), header.get_int("expert_used_count")
    return used / count if count and used else 1.0


def _share(tensor: TensorInfo, names: set[str], used: float, header: ModelHeader) -> float:
    """Return the fraction of a tensor that must be read for a token."""
    if _lookup(tensor, names):
        return 1 / tensor.rows
    if EXPERT_MARK in tensor.name:
        return used
    return 0.0 if _idle(tensor.name, header) else 1.0


def _lookup(tensor: TensorInfo, names: set[str]) -> bool:
    """Return whether a token reads only one row of the tensor. An embedding that is also the output
    head is read completely.
    """
    return tensor.name in LOOKUP_TENSORS and (
        tensor.name != LOOKUP_TENSORS[0] or "output.weight" in names
    )


def _idle(name: str, header: ModelHeader) -> bool:
    """Return whether a tensor belongs to layers for multi-token prediction, which plain decoding
    does not compute.
    """
    parts, extra = name.split("."), header.get_int("nextn_predict_layers") or 0
    trunk = (header.get_int("block_count") or 0) - extra
    return bool(extra) and parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) >= trunk
