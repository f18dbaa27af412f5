"""The description of a model family for the converter: class names, metadata keys, tensors and
their transformations.

A family consists of data and small pure functions. A family that differs little from another is
written as `replace(LLAMA, ...)`. Most GGUF tensor names come from gguf_tables.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors

if TYPE_CHECKING:
    from quant.native.ggml import F32

# The settings of sentence-transformers' pooling. Its content is in the config under this name.
POOLING_FILE = "1_Pooling/config.json"

# Beginnings of metadata keys that have no prefix of the architecture.
WHOLE_NAMES = ("tokenizer.", "xielu.")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ArchKey:
    """One metadata key of a converted file: its name without the architecture's prefix, its GGUF
    type and its value. A name that begins as one of WHOLE_NAMES is the whole name.

    The GGUF type of an array is written "array:int32".
    """

    name: str
    kind: str
    value: int | float | str | bool | list[int] | list[float] | list[bool] | list[str]

    def full_name(self, architecture: str) -> str:
        """Return the name in the file of an architecture."""
        return self.name if self.name.startswith(WHOLE_NAMES) else f"{architecture}.{self.name}"


TensorOp = Callable[[CheckpointConfig, LazyTensor], LazyTensor]


def no_tensors(config: CheckpointConfig) -> dict[str, Any]:
    """Return an empty dictionary. This is the default for families without such tensors."""
    return {}


def no_keys(config: CheckpointConfig, tensors: Tensors) -> list[ArchKey]:
    """Return no metadata keys. This is the default for families whose keys need no tensors."""
    return []


def keep_tensors(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors unchanged. This is the default for families that need no preparation."""
    return tensors


def keep_config(config: CheckpointConfig) -> CheckpointConfig:
    """Return the settings unchanged. This is the default for families with one spelling."""
    return config


@dataclass(frozen=True, slots=True)
class Arch:
    """A model family.

    `name` is llama.cpp's name of the architecture, `kind` the name of its MODEL_ARCH in
    gguf_tables.py, and `hf` the class names in config.json. `defaults` are the values that transformers'
    config class has for settings that config.json omits. With `vocab_size_from_tokenizer`, a
    config.json without vocab_size gets the size of the tokenizer's vocabulary, and added tokens
    beyond that size are left out.

    A checkpoint's tensors pass through these fields in this order:

    - `dropped_endings`: tensors whose names have these endings are left out, because they are
      buffers that can be computed.
    - `prepare`: a function that stacks experts and splits fused matrices, so that each tensor has a
      name that gguf_tables.py knows. The keys of the returned dictionary are these names; a
      tensor's own `name` is only shown in messages. Tensors that the function does not recognize
      stay unchanged and are reported as unknown.
    - `names`: ending of a checkpoint tensor's name -> GGUF role, for tensors that
      `gguf_tables.find_names` does not know.
    - `required_shapes` and `optional_shapes`: the GGUF tensors with their shapes, rows first. Any
      other tensor or shape is an error.
    - `ops`: role ("attn_q", "nextn.enorm") -> a function that transforms the weights and biases of this role. It
      must keep the shape, except that a vocabulary may lose rows.
    - `extra_tensors`: a function that returns tensors computed from the settings alone.

    `tensor_keys` returns metadata keys that contain values of tensors, given the tensors before
    `prepare`. Such tensors are left out with `dropped_endings`.

    `prediction_shapes` returns the shapes of the tensors of one layer that predicts further tokens
    (see prediction.py), by role. It is None if llama.cpp has no such layers for the family.

    `prediction_name` returns the name of a tensor of such a layer as prediction.layer_name() does,
    which is used without it.

    With `needs_head`, a tied embedding is also written as the head, because llama.cpp loads the
    head by its own name. `keys` returns the architecture's metadata keys. `check` raises UserError
    for settings that llama.cpp computes differently, and returns notes for the user.

    `normalize` brings settings that config.json spells in several ways into one. `select` is for
    classes whose models belong to several architectures of llama.cpp: it returns the family that
    the settings need. Without it, the family itself is used.
    """

    name: str
    kind: str
    hf: tuple[str, ...]
    keys: Callable[[CheckpointConfig], list[ArchKey]]
    required_shapes: Callable[[CheckpointConfig], Shapes]
    check: Callable[[CheckpointConfig], list[str]]
    optional_shapes: Callable[[CheckpointConfig], Shapes] = no_tensors
    defaults: Mapping[str, Any] = field(default_factory=dict)
    vocab_size_from_tokenizer: bool = False
    prepare: Callable[[CheckpointConfig, Tensors], Tensors] = keep_tensors
    names: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, TensorOp] = field(default_factory=dict)
    extra_tensors: "Callable[[CheckpointConfig], dict[str, F32]]" = no_tensors
    tensor_keys: Callable[[CheckpointConfig, Tensors], list[ArchKey]] = no_keys
    prediction_shapes: Callable[[CheckpointConfig], Shapes] | None = None
    prediction_name: Callable[[CheckpointConfig, str], str] | None = None
    needs_head: bool = False
    normalize: Callable[[CheckpointConfig], CheckpointConfig] = keep_config
    select: "Callable[[CheckpointConfig], Arch] | None" = None
    dropped_endings: tuple[str, ...] = (
        ".rotary_emb.inv_freq",
        ".attention.masked_bias",
        ".attention.bias",
    )

    def resolve(self, stored: CheckpointConfig) -> "tuple[Arch, CheckpointConfig]":
        """Return the family that the settings in config.json need, and these settings with the
        family's defaults and in its spelling.
        """
        values = {**self.defaults, **stored.values}
        config = self.normalize(CheckpointConfig(values, stored.location))
        return self.select(config) if self.select else self, config
