"""The cost of generating one token: the number of bytes to read and of arithmetic operations. Both
follow from the model file's header and from the depth, which is the number of preceding tokens.

The bytes of the weights are their bytes in the file. Two kinds of tensors count only partly: one
row of a lookup table such as the embedding (unless the table is also the output head), and those
experts that a token uses. The KV cache of all preceding tokens is read, too; a layer with
sliding-window attention reads at most the window.
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
    """The cost of one token. A multiplication together with its addition counts as two operations.

    `weight_bytes`: bytes of weights to read, by tensor type. `kv_bytes`: bytes of the KV cache to
    read, None: unknown. `weight_operations`: operations on weights, including `head_operations` on
    the output head. `attention_operations`: operations in attention, None: unknown.
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
        """Operations per byte read, if only one sequence is generated; None: unknown."""
        if self.nbytes is None or self.attention_operations is None:
            return None
        return (self.weight_operations + self.attention_operations) / self.nbytes


def token_cost(
    header: ModelHeader, depth: int, type_k: str = "f16", type_v: str = "f16"
) -> TokenCost:
    """Return the cost of a token with `depth` preceding tokens. `type_k`, `type_v`: the types of
    the KV cache.
    """
    bytes_by_type: dict[str, int] = {}
    n_values = head = 0
    names = {tensor.name for tensor in header.tensors}
    expert_share = _used_expert_fraction(header)
    for tensor in header.tensors:
        fraction = _read_fraction(tensor, names, expert_share, header)
        bytes_by_type[tensor.type] = bytes_by_type.get(tensor.type, 0) + int(
            tensor.nbytes * fraction
        )
        if len(tensor.shape) > 1 and fraction and not _is_lookup_table(tensor, names):
            n_values += int(tensor.elements * fraction)
            head += tensor.elements if tensor.name in ("output.weight", "token_embd.weight") else 0
    cache_shape = kv_size.read_shape(header.metadata)
    if cache_shape is None:
        return TokenCost(bytes_by_type, None, 2 * n_values, 2 * head, None, expert_share < 1)
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
    return TokenCost(bytes_by_type, nbytes, 2 * n_values, 2 * head, attention, expert_share < 1)


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


def _used_expert_fraction(header: ModelHeader) -> float:
    """Return the fraction of the experts that one token uses; 1 for a model without experts."""
    count, used = header.get_int("expert_count"), header.get_int("expert_used_count")
    return used / count if count and used else 1.0


def _read_fraction(tensor: TensorInfo, names: set[str], used: float, header: ModelHeader) -> float:
    """Return the fraction of a tensor's bytes that must be read for one token. `names`: the names
    of all tensors. `used`: the fraction of the experts that a token uses.
    """
    if _is_lookup_table(tensor, names):
        return 1 / tensor.rows
    if EXPERT_MARK in tensor.name:
        return used
    return 0.0 if _is_unused(tensor.name, header) else 1.0


def _is_lookup_table(tensor: TensorInfo, names: set[str]) -> bool:
    """Return whether a token reads only one row of the tensor. An embedding that is also the output
    head is not such a table: it is read completely.
    """
    return tensor.name in LOOKUP_TENSORS and (
        tensor.name != LOOKUP_TENSORS[0] or "output.weight" in names
    )


def _is_unused(name: str, header: ModelHeader) -> bool:
    """Return whether a tensor belongs to the layers for multi-token prediction, which ordinary
    decoding does not compute.
    """
    parts, extra = name.split("."), header.get_int("nextn_predict_layers") or 0
    trunk = (header.get_int("block_count") or 0) - extra
    return bool(extra) and parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) >= trunk
