"""The cost of one token: the bytes that must be read and the operations, computed from a file's
header and the depth.

Weights count with their stored size. A lookup table such as the embedding counts one row, unless it
is also the output head; of the experts only the used ones count. The KV cache is that of the
preceding tokens, in sliding-window layers at most the window.
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
    """The cost of one token. One multiplication with its addition counts as two operations.

    `weight_bytes`: by type. `kv_bytes`: bytes of the KV cache. `weight_operations`: operations on
    weights, of which `head_operations` belong to the output head. `attention_operations`:
    operations in attention. None: unknown for this cache. `has_routed_experts`: a token uses only
    some of the experts.
    """

    weight_bytes: Mapping[str, int]
    kv_bytes: int | None
    weight_operations: int
    head_operations: int
    attention_operations: int | None
    has_routed_experts: bool = False

    @property
    def nbytes(self) -> int | None:
        """All bytes that must be read."""
        return None if self.kv_bytes is None else sum(self.weight_bytes.values()) + self.kv_bytes

    @property
    def intensity(self) -> float | None:
        """Operations per byte for a single sequence."""
        if self.nbytes is None or self.attention_operations is None:
            return None
        return (self.weight_operations + self.attention_operations) / self.nbytes


def token_cost(
    header: ModelHeader, depth: int, type_k: str = "f16", type_v: str = "f16"
) -> TokenCost:
    """Return the cost of the token after `depth` others."""
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
    """Return the operations of a prompt: every weight for each token, the head for the last token,
    and attention to the preceding tokens.
    """
    last = token_cost(header, tokens // 2)
    if last.attention_operations is None:
        return None
    return (
        tokens * (last.weight_operations - last.head_operations + last.attention_operations)
        + last.head_operations
    )


def _used(header: ModelHeader) -> float:
    """Return the share of the experts that a token uses; 1 without experts."""
    count, used = header.get_int("expert_count"), header.get_int("expert_used_count")
    return used / count if count and used else 1.0


def _share(tensor: TensorInfo, names: set[str], used: float, header: ModelHeader) -> float:
    """Return the share of a tensor that a token reads."""
    if _lookup(tensor, names):
        return 1 / tensor.rows
    if EXPERT_MARK in tensor.name:
        return used
    return 0.0 if _idle(tensor.name, header) else 1.0


def _lookup(tensor: TensorInfo, names: set[str]) -> bool:
    """Return whether only one row is read. An embedding that is also the head is read
    completely.
    """
    return tensor.name in LOOKUP_TENSORS and (
        tensor.name != LOOKUP_TENSORS[0] or "output.weight" in names
    )


def _idle(name: str, header: ModelHeader) -> bool:
    """Return whether a tensor belongs to layers that predict further tokens, which plain decoding
    does not run.
    """
    parts, extra = name.split("."), header.get_int("nextn_predict_layers") or 0
    trunk = (header.get_int("block_count") or 0) - extra
    return bool(extra) and parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) >= trunk
