"""A model family as the converter sees it: class names, metadata keys, tensors and their
transformations.

A family is data and small pure functions. A close relative of a family is written as
`replace(LLAMA, ...)`. Tensor names come from the gguf package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quant.errors import Refusal
from quant.tensors import LazyTensor

if TYPE_CHECKING:
    from quant.native import F32

MAX_LAYERS = 512  # llama.cpp, LLAMA_MAX_LAYERS

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, LazyTensor]


@dataclass(frozen=True, slots=True)
class Config:
    """The values of config.json, with the settings of the text model at the root.

    `location` names the file in error messages.
    """

    values: Mapping[str, Any]
    where: str

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return the positive integer under the first of `keys` that is present.

        Raises UserError if the value is not an integer below 2**31, or if no key is present and
        there is no default.
        """
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if type(value) is not int or not 0 < value < 1 << 31:
                    raise Refusal(
                        f"{self.where}: {key} is {value!r}, not a positive number",
                        hint="fetch it again",
                    )
                return value
        if default is None:
            raise Refusal(f"{self.where} has no {keys[0]}", hint="fetch it again")
        return default

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number as a float. Raises UserError for any other value."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise Refusal(
                f"{self.where}: {key} is {value!r}, not a positive number", hint="fetch it again"
            )
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; a missing key and null give the default. Raises UserError for any other
        value.
        """
        value = self.values.get(key)
        if value is not None and type(value) is not bool:
            raise Refusal(
                f"{self.where}: {key} is {value!r}, not true or false", hint="fetch it again"
            )
        return default if value is None else value


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
