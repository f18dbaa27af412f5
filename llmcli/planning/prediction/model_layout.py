"""The bytes of a model file by layer, from its header: what placement and speed are computed from."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmcli.runtime import kv_size
from quant.model_file.model_header import ModelHeader

LAYER_NAME = re.compile(r"blk\.(\d+)\.")
# tensors with all experts of a layer; those of --n-cpu-moe in common/arg.cpp
EXPERTS_NAME = re.compile(r"blk\.\d+\.ffn_(up|down|gate|gate_up)_(ch|)exps")
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
INPUT_NAMES = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer in bytes. `dense`: read for every token. `experts`: all experts.
    `largest_dense`, `largest_experts`: the largest tensor of each kind.
    """

    dense: int = 0
    experts: int = 0
    largest_dense: int = 0
    largest_experts: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights of the layer."""
        return self.dense + self.experts

    def with_tensor(self, name: str, nbytes: int) -> "LayerWeights":
        """Return the weights together with a tensor of `nbytes` bytes."""
        if EXPERTS_NAME.match(name):
            return replace(
                self,
                experts=self.experts + nbytes,
                largest_experts=max(self.largest_experts, nbytes),
            )
        return replace(
            self, dense=self.dense + nbytes, largest_dense=max(self.largest_dense, nbytes)
        )


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The weights of a model by place, in bytes.

    - `layers`: by number of the layer.
    - `inputs`: embeddings, which always stay on the host, and of which a token reads one row.
    - `output`: the output matrix and its norm. A model without an output matrix uses the embeddings,
      of which a device then gets a copy, and so does the host if it repacks them for its kernels;
      `tied_bytes` is the size of this copy.
    - `expert_share`: the part of the experts that a token reads.
    - `width`, `ffn_width`, `n_vocab`: values of a token between layers, of the widest product inside
      a layer, and of a row of logits.
    - `query_values`: values of all queries of a layer. `query_heads`: their number.
    - `pinned`: tensors with a place of their own (--override-tensor), by place: the index of a
      device, or -1 for the host. No other field counts them.
    - `is_mapped`: weights on the host are in the mapped file, so that they need not stay in memory.
    """

    layers: tuple[LayerWeights, ...]
    inputs: int
    output: int
    tied_bytes: int
    expert_share: float
    width: int
    ffn_width: int
    n_vocab: int
    query_values: int
    query_heads: int
    pinned: tuple[tuple[int, LayerWeights], ...] = ()
    is_mapped: bool = True

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights that are loaded."""
        pinned = sum(weights.nbytes for _, weights in self.pinned)
        layers = sum(layer.nbytes for layer in self.layers)
        return self.inputs + self.output - self.tied_bytes + pinned + layers

    @property
    def has_experts(self) -> bool:
        """Return whether any layer has experts."""
        return any(layer.experts for layer in self.layers)

    def read_bytes(self, layer: LayerWeights) -> float:
        """Return the bytes of a layer that a token reads."""
        return layer.dense + layer.experts * self.expert_share

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of weights that a token reads."""
        pinned = sum(self.read_bytes(weights) for _, weights in self.pinned)
        return self.output + pinned + sum(map(self.read_bytes, self.layers))


def read_layout(
    header: ModelHeader, place_of: Callable[[str], int | None] = lambda name: None
) -> ModelLayout:
    """Return the layout of a model file. `place_of`: returns the place of a tensor that has a place
    of its own, by its name: the index of a device, or -1 for the host. Otherwise it returns None.
    """
    n_layers = header.get_int("block_count") or 0
    # llama.cpp does not load the layers that predict further tokens (load_mtp)
    n_loaded = n_layers - (header.get_int("nextn_predict_layers") or 0)
    layers = [LayerWeights()] * n_layers
    inputs = output = tied_bytes = 0
    names = {tensor.name for tensor in header.tensors}
    width = n_vocab = widest = 0
    pinned: dict[int, LayerWeights] = {}
    for tensor in header.tensors:
        name, size = tensor.name, tensor.nbytes
        place = place_of(name)
        if place is not None:
            # a device has two copies of embeddings that are also the output matrix
            copies = 2 if place >= 0 and name == EMBEDDING and OUTPUT not in names else 1
            pinned[place] = pinned.get(place, LayerWeights()).with_tensor(name, size * copies)
            size = 0
        found = LAYER_NAME.match(name)
        if found is None:
            is_input = name.split(".", 1)[0] in INPUT_NAMES
            inputs += size if is_input else 0
            output += 0 if is_input else size
            if name == EMBEDDING:
                width, n_vocab = tensor.shape[0], tensor.shape[-1]
                tied_bytes = size if OUTPUT not in names else 0
                output += tied_bytes
            continue
        layer = int(found[1])
        if layer >= n_loaded:
            continue
        layers[layer] = layers[layer].with_tensor(name, size)
        if len(tensor.shape) == 2:
            widest = max(widest, tensor.shape[1])
    n_experts = header.get_int("expert_count") or 0
    n_used = header.get_int("expert_used_count") or 0
    expert_ffn = header.get_int("expert_feed_forward_length") or 0
    if n_experts and n_used:
        # each of the used experts has an output as wide as the model
        widest = max(widest, n_used * max(expert_ffn, width))
    heads = _largest(header, "attention.head_count")
    head = header.get_int("attention.key_length") or (width // heads if heads else 0)
    return ModelLayout(
        tuple(layers),
        inputs,
        output,
        tied_bytes,
        min(1.0, n_used / n_experts) if n_experts and n_used else 1.0,
        width,
        widest,
        n_vocab,
        heads * head,
        heads,
        tuple(sorted(pinned.items())),
    )


def _largest(header: ModelHeader, key: str) -> int:
    """Return a number of the header; the largest one if it has one for each layer. 0: unknown."""
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    try:
        return max(kv_size.per_layer_numbers(value, header.get_int("block_count") or 1), default=0)
    except (TypeError, ValueError, OverflowError):
        return 0
