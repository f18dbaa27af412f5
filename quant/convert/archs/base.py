"""A model family as the converter sees it: class names, metadata keys, tensors and their
transformations.

A family is data and small pure functions. A close relative of a family is written as
`replace(LLAMA, ...)`. Tensor names come from the gguf package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import Config
from quant.checkpoint.safetensors import LazyTensor, Tensors

if TYPE_CHECKING:
    from quant.native.ggml import F32

MAX_LAYERS = 512  # llama.cpp, LLAMA_MAX_LAYERS

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Key:
    """One metadata key of the architecture: its name without the prefix, its GGUF type and its
    value.

    The GGUF type of an array is written "array:int32".
    """

    name: str
    kind: str
    value: int | float | str | bool | list[int] | list[float] | list[bool]


Op = Callable[[Config, LazyTensor], LazyTensor]


def nothing(config: Config) -> dict[str, Any]:
    """Return no tensors."""
    return {}


def unchanged(config: Config, tensors: Tensors) -> Tensors:
    """Return the checkpoint's tensors unchanged."""
    return tensors


@dataclass(frozen=True, slots=True)
class Arch:
    """A model family.

    `kind` names the gguf package's MODEL_ARCH, `hf` the class names in config.json. `defaults` are
    the class's values for settings that config.json omits. With `vocab_size_from_tokenizer`, a
    config without vocab_size takes the tokenizer's size, and added tokens beyond it are left out.

    A checkpoint's tensors pass through these fields in this order:

    - `dropped_endings`: endings of names to leave out (buffers that can be computed).
    - `prepare`: makes tensors that the gguf package's name tables know, one for each entry (stacks
      experts, splits fused matrices). The keys of its result are looked up there; a tensor's `name`
      is shown in messages. Tensors it does not recognize pass through and are listed in the error.
    - `names`: ending of the Hugging Face name -> GGUF role, for tensors that
      `gguf.get_tensor_name_map` does not know.
    - `required_shapes` and `optional_shapes`: the GGUF tensors with their shapes, rows first. Any
      other tensor or shape is an error.
    - `ops`: a transformation for each role ("attn_q"), applied to its weights and biases. It keeps
      the shape, except that a vocabulary may lose rows.
    - `extra_tensors`: tensors computed from the config alone.

    `needs_head` writes a copy of a tied embedding as the head, because llama.cpp loads the head by
    name. `keys` returns the architecture's metadata keys. `check` raises UserError for settings
    that llama.cpp computes differently, and returns notes for the user.
    """

    name: str
    kind: str
    hf: tuple[str, ...]
    keys: Callable[[Config], list[Key]]
    expected: Callable[[Config], Shapes]
    check: Callable[[Config], list[str]]
    optional: Callable[[Config], Shapes] = nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spare: bool = False
    prepare: Callable[[Config, Tensors], Tensors] = unchanged
    names: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, Op] = field(default_factory=dict)
    extra: "Callable[[Config], dict[str, F32]]" = nothing
    needs_head: bool = False
    drop: tuple[str, ...] = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")


def rope_rows(heads: int, head_dim: int) -> list[int]:
    """Return the row order that turns half-split rotary heads into interleaved pairs.

    In each head, row 2i of the result is row i of the source, and row 2i+1 is row i + head_dim/2.
    """
    half = head_dim // 2
    return [
        head * head_dim + half_index * half + pair
        for head in range(heads)
        for pair in range(half)
        for half_index in (0, 1)
    ]
