"""What an architecture is to the converter: names of classes, keys, and what becomes of each
tensor.

Data and small pure functions; a relative of a family is `replace(LLAMA, …)`. Tensor names come from
the gguf package. It reads no files.
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
    """config.json with its text part at the root; numbers are asked for with their bounds."""

    values: Mapping[str, Any]
    where: str

    def number(self, *keys: str, default: int | None = None) -> int:
        """A positive integer under the first of `keys` that is there."""
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
            raise Refusal(f"{self.where} does not say {keys[0]}", hint="fetch it again")
        return default

    def real(self, key: str, default: float | None = None) -> float:
        """A positive real number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise Refusal(
                f"{self.where}: {key} is {value!r}, not a positive number", hint="fetch it again"
            )
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value; null counts as not said."""
        value = self.values.get(key)
        if value is not None and type(value) is not bool:
            raise Refusal(
                f"{self.where}: {key} is {value!r}, neither true nor false", hint="fetch it again"
            )
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class Key:
    """One architecture key of the file: name without its prefix, GGUF type, value; arrays as
    "array:int32".
    """

    name: str
    kind: str
    value: int | float | str | bool | list[int] | list[float] | list[bool]


Op = Callable[[Config, LazyTensor], LazyTensor]


def nothing(config: Config) -> dict[str, Any]:
    """No tensors."""
    return {}


def unchanged(config: Config, tensors: Tensors) -> Tensors:
    """The tensors as the checkpoint has them."""
    return tensors


@dataclass(frozen=True, slots=True)
class Arch:
    """A family: `kind` names the gguf package's MODEL_ARCH, `hf` the classes in config.json.

    `defaults` are the values that the class gives to settings which config.json does not name; with
    `spare`, a config without a vocab_size takes the tokenizer's, and tokens beyond it are left out.
    A checkpoint's tensors pass, in this order: `drop`      endings of names that are left out
    (buffers that can be computed); `prepare`   makes of them tensors that the gguf package's name
    tables know, one each (stacks experts,
                splits what is fused): the keys of its result are the names looked up there, a
                tensor's own name is what the user is told; what it does not understand it leaves
                for the error that lists it;
    names       gguf.get_tensor_name_map(kind), plus `names` (ending of the HF name -> GGUF role)
    for what
                the package does not know;
    `expected`  the GGUF tensors that must be there with their shapes, rows first, and `optional`
    those that
                may; anything else, and any other shape, is refused;
    `ops`       what is done to a tensor, by the GGUF name's role ("attn_q"; the weight's and the
    bias's); it
                keeps the shape, but a vocabulary may lose rows;
    `extra`     tensors made from the config alone; `needs_head` the file gets a copy of a tied
    embedding as its head, because llama.cpp loads it by name. `keys` are the architecture's keys of
    the file; `check` refuses what the classes' configs may ask for and llama.cpp does not compute,
    and returns what the user should know.
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
    """Where the rows of a half-split rotary projection go to become interleaved pairs, head by
    head.

    Row 2i of a head of the result is row i of the source, row 2i+1 is row i + head_dim/2.
    """
    half = head_dim // 2
    return [
        head * head_dim + part * half + pair
        for head in range(heads)
        for pair in range(half)
        for part in (0, 1)
    ]
