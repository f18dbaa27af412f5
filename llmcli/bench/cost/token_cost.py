"""What one token costs: the bytes that must be read and the operations, from a file's header and
the depth.

Weights count as they are stored; a lookup (the embedding) is one row of it, unless it is the head
too; of experts those that are used. KV is that of the tokens before, in window layers no more than
the window. It measures nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmcli.runtime import kv_size
from quant.gguf.header import TensorInfo
from quant.model_file.model_header import ModelHeader

LOOKUPS = (
    "token_embd.weight",
    "per_layer_token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
)
EXPERTS = "_exps."


@dataclass(frozen=True, slots=True)
class Work:
    """One token's work: bytes of weights by type, bytes of KV; operations (a multiplication and an
    addition are two) on weights, of which `head` are the head's, and in attention. `kv` and
    `attention` None: this cache is not known. `chosen`: a token goes through some of its experts
    only.
    """

    weights: Mapping[str, int]
    kv: int | None
    operations: int
    head: int
    attention: int | None
    chosen: bool = False

    @property
    def nbytes(self) -> int | None:
        """All bytes that must be read."""
        return None if self.kv is None else sum(self.weights.values()) + self.kv

    @property
    def intensity(self) -> float | None:
        """Operations a byte, where one sequence is computed alone."""
        if self.nbytes is None or self.attention is None:
            return None
        return (self.operations + self.attention) / self.nbytes


def work(header: ModelHeader, depth: int, type_k: str = "f16", type_v: str = "f16") -> Work:
    """The work of the token behind `depth` others."""
    read: dict[str, int] = {}
    values = head = 0
    names = {tensor.name for tensor in header.tensors}
    used = _used(header)
    for tensor in header.tensors:
        share = _share(tensor, names, used, header)
        read[tensor.type] = read.get(tensor.type, 0) + int(tensor.nbytes * share)
        if len(tensor.shape) > 1 and share and not _lookup(tensor, names):
            values += int(tensor.elements * share)
            head += tensor.elements if tensor.name in ("output.weight", "token_embd.weight") else 0
    form = kv_size.read_shape(header.metadata)
    if form is None:
        return Work(read, None, 2 * values, 2 * head, None, used < 1)
    heads = header.get_int("attention.head_count") or 0
    cells = [
        min(depth, form.window) if windowed and form.window else depth
        for windowed in form.is_windowed
    ]
    nbytes = sum(
        n * (kv_size.row_bytes(type_k, k) + kv_size.row_bytes(type_v, v))
        for n, k, v in zip(cells, form.k_values, form.v_values, strict=True)
    )
    attention = sum(
        2 * n * heads * (k + v) for n, k, v in zip(cells, form.k_heads, form.v_heads, strict=False)
    )
    return Work(read, nbytes, 2 * values, 2 * head, attention, used < 1)


def prefill(header: ModelHeader, tokens: int) -> int | None:
    """Operations of a prompt: every weight for each token, the head for the last alone, attention
    to those before.
    """
    last = work(header, tokens // 2)
    if last.attention is None:
        return None
    return tokens * (last.operations - last.head + last.attention) + last.head


def _used(header: ModelHeader) -> float:
    """The share of its experts that a token goes through; 1 where there are none."""
    count, used = header.get_int("expert_count"), header.get_int("expert_used_count")
    return used / count if count and used else 1.0


def _share(tensor: TensorInfo, names: set[str], used: float, header: ModelHeader) -> float:
    """How much of a tensor a token reads."""
    if _lookup(tensor, names):
        return 1 / tensor.rows
    if EXPERTS in tensor.name:
        return used
    return 0.0 if _idle(tensor.name, header) else 1.0


def _lookup(tensor: TensorInfo, names: set[str]) -> bool:
    """Whether only a row is read: not of an embedding that is the head as well."""
    return tensor.name in LOOKUPS and (tensor.name != LOOKUPS[0] or "output.weight" in names)


def _idle(name: str, header: ModelHeader) -> bool:
    """Whether a tensor belongs to layers that predict further tokens, which plain decoding leaves
    out.
    """
    parts, extra = name.split("."), header.get_int("nextn_predict_layers") or 0
    trunk = (header.get_int("block_count") or 0) - extra
    return bool(extra) and parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) >= trunk
