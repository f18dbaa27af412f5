"""The channels of each architecture that may be rescaled or reordered, taken from llama.cpp's
graphs (src/models/*.cpp). There are five kinds of sites; s are the factors of a site's channels.

- norm: the norm's weight (and bias) is divided by s, and the columns of all tensors that read the
  norm's output are multiplied by s. These tensors are the attention's, those of the feed-forward
  network with router and shared experts, and inside MLA the tensors that read compressed queries
  and keys
- hidden: the rows of up are divided by s and the columns of down multiplied by s, for each expert;
  gate, up and down may be permuted together. There are no factors if the activation is not linear
  in up (gpt-oss clamps it)
- value: the rows of v are divided by s and the columns of attn_output multiplied by s, with one
  factor for all query heads that share a key-value head; channels may be permuted within a head
- head: the last norm is divided by s and the columns of the output head are multiplied by s; there
  is no such site if the head is tied to the embedding
- residual: one permutation of every tensor that reads or writes the residual stream, including tied
  embeddings

The channels of the residual stream have no free factors, because RMSNorm does not commute with
factors of channels; the same is true for a tied embedding, whose values the stream contains
unchanged. Only their order is free (and signs, and one factor for the whole model). The channels
between queries and keys have free factors, but these scale whole rows, which does not change the
rounding of rows in any block format, so they are not used.

An architecture that is not in the table FREE_CHANNELS is refused. A block is left unchanged if it
has a tensor that the table does not name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quant.errors import UserError
from quant.folds.fold import FoldedTensor, FoldSite
from quant.recipes.tensor_types import TRAINED_TYPES
from quant.source.source import Source, Weight

if TYPE_CHECKING:
    from quant.folds.fold import Ints

QKV_ROLES = ("attn_q", "attn_k", "attn_v", "attn_qkv")
FFN_ROLES = (
    "ffn_gate",
    "ffn_up",
    "ffn_gate_inp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_gate_inp_shexp",
    "ffn_gate_shexp",
    "ffn_up_shexp",
)
FFN_TRIPLES = tuple(
    (f"ffn_gate{end}", f"ffn_up{end}", f"ffn_down{end}") for end in ("", "_exps", "_shexp")
)
# Roles that neither read nor write the residual stream.
CHANNELLESS_ROLES = ("attn_q_norm", "attn_k_norm", "attn_sinks", "exp_probs_b")
GLOBAL_STEMS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
# Norms as wide as the residual stream.
NORM_ROLES = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
WRITER_ROLES = ("attn_output", *(down for _, _, down in FFN_TRIPLES))
BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")
GLOBAL_TENSOR = re.compile(r"([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True)
class FreeChannels:
    """The free channels of one kind of graph, which several architectures may share. A role is a
    tensor's name without block number and ending ("attn_q").

    `norms` maps a norm to the roles of the tensors that read its output: by columns, or by rows for
    the roles in `row_readers`. `value_roles` are the roles of the tensors that produce values.
    `has_fused_gate` means that up contains gate and up, gate first. `is_linear_in_up` means that
    the activation is linear in up, so that hidden channels have free factors. `readers` read the
    residual stream.
    """

    norms: Mapping[str, tuple[str, ...]]
    value_roles: tuple[str, ...] = ("attn_v", "attn_qkv")
    row_readers: frozenset[str] = frozenset()
    has_fused_gate: bool = False
    is_linear_in_up: bool = True
    readers: tuple[str, ...] = (*QKV_ROLES, *FFN_ROLES)
    # tensors inside the attention, which neither read nor write the residual stream
    inner_roles: tuple[str, ...] = ()

    @property
    def roles(self) -> frozenset[str]:
        """Every role that a block may contain. A block with any other role is not folded."""
        return frozenset(
            (*self.readers, *self.inner_roles, *NORM_ROLES, *WRITER_ROLES, *CHANNELLESS_ROLES)
        )


GATED_GRAPH = FreeChannels({"attn_norm": QKV_ROLES, "ffn_norm": FFN_ROLES})
FUSED_GRAPH = replace(GATED_GRAPH, has_fused_gate=True)
GPT_OSS_GRAPH = replace(
    GATED_GRAPH,
    norms={"attn_norm": QKV_ROLES, "post_attention_norm": FFN_ROLES},
    is_linear_in_up=False,
)
MLA_GRAPH = FreeChannels(
    {
        "attn_norm": ("attn_q", "attn_q_a", "attn_kv_a_mqa"),
        "ffn_norm": FFN_ROLES,
        "attn_q_a_norm": ("attn_q_b",),
        "attn_kv_a_norm": ("attn_kv_b", "attn_v_b", "attn_k_b"),
    },
    value_roles=("attn_v_b",),
    row_readers=frozenset({"attn_k_b"}),
    readers=("attn_q", "attn_q_a", "attn_kv_a_mqa", *FFN_ROLES),
    inner_roles=(
        "attn_q_a_norm",
        "attn_q_b",
        "attn_kv_a_norm",
        "attn_kv_b",
        "attn_k_b",
        "attn_v_b",
    ),
)
FREE_CHANNELS: dict[str, FreeChannels] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral3",
            "qwen2",
            "qwen3",
            "qwen2moe",
            "qwen3moe",
            "gemma",
            "gemma2",
            "gemma3",
            "granite",
            "granitemoe",
            "smollm3",
        ),
        GATED_GRAPH,
    ),
    "phi3": FUSED_GRAPH,
    "glm4": FUSED_GRAPH,
    "olmo2": replace(GATED_GRAPH, norms={}),
    "gpt-oss": GPT_OSS_GRAPH,
    "deepseek2": MLA_GRAPH,
}


def find_sites(source: Source) -> tuple[FoldSite, ...]:
    """Return all sites of a model, block by block, then the head and the residual stream.

    Sites with a tensor in a type that models are trained in (MXFP4) are left out. Raises UserError
    if the architecture is not in FREE_CHANNELS.
    """
    architecture = source.facts.architecture
    if (wiring := FREE_CHANNELS.get(architecture)) is None:
        raise UserError(
            f"--fold does not support the architecture {architecture}",
            hint=f"foldable architectures: {', '.join(sorted(FREE_CHANNELS))}; leave --fold out",
        )
    model = _Model(source, wiring)
    block_sites = [site for block in model.blocks.values() for site in model.block_sites(block)]
    return tuple(site for site in [*block_sites, *model.global_sites()] if model.may_change(site))


@dataclass(frozen=True)
class _Block:
    """The tensors of one block ("blk.3"), by role and ending ("attn_q.weight")."""

    name: str
    tensors: Mapping[str, Weight]


class _Model:
    """A source's tensors, sorted into blocks whose tensors are all known (`blocks`), all blocks,
    and global tensors.
    """

    def __init__(self, source: Source, wiring: FreeChannels) -> None:
        self.wiring, self.heads = wiring, source.facts.heads
        self.weights = {weight.name: weight for weight in source.weights}
        blocks: dict[str, dict[str, Weight]] = {}
        # names of blocks that have an unknown tensor, and names of unknown global tensors
        self.unsupported: set[str] = set()
        global_stems = {"token_embd", "output_norm", "output", *GLOBAL_STEMS}
        for name, weight in self.weights.items():
            if match := BLOCK_TENSOR.fullmatch(name):
                blocks.setdefault(f"blk.{match[1]}", {})[f"{match[2]}.{match[3]}"] = weight
            stem = f"blk.{name.split('.')[1]}" if name.startswith("blk.") else name
            supported = (
                match[2] in wiring.roles
                if match
                else bool((m := GLOBAL_TENSOR.fullmatch(name)) and m[1] in global_stems)
            )
            if not supported:
                self.unsupported.add(stem)
        self.all_blocks = [_Block(name, tensors) for name, tensors in blocks.items()]
        self.blocks = {
            block.name: block for block in self.all_blocks if block.name not in self.unsupported
        }

    def may_change(self, site: FoldSite) -> bool:
        """Return whether all tensors of the site may be requantized: none is in a type that models
        are trained in.
        """
        return not any(self.weights[tensor.name].type in TRAINED_TYPES for tensor in site.tensors)

    def block_sites(self, block: _Block) -> Iterator[FoldSite]:
        """Yield the norm, hidden and value sites of a block."""
        for norm, readers in self.wiring.norms.items():
            if f"{norm}.weight" in block.tensors:
                yield self._norm_site(block, norm, readers)
        for gate, up, down in FFN_TRIPLES:
            if {f"{up}.weight", f"{down}.weight"} <= block.tensors.keys():
                yield self._hidden_site(block, gate, up, down)
        yield from self._value_site(block)

    def global_sites(self) -> Iterator[FoldSite]:
        """Yield the sites of the head and of the residual stream. Yield none if the model has an
        unknown tensor, which might read these channels.
        """
        if self.unsupported:
            return
        norms = [
            self.weights[name] for name in _weight_and_bias("output_norm") if name in self.weights
        ]
        if not norms:
            return
        width, head = norms[0].columns, self.weights.get("output.weight")
        if head is not None:
            tensors = [_columns(weight, width, -1) for weight in norms]
            yield FoldSite("head", "head", width, 0, True, (*tensors, _columns(head, width, 1)))
        global_tensors = [
            _columns(weight, width, 0)
            for name, weight in self.weights.items()
            if name.split(".")[0] in ("token_embd", "output_norm") or name == "output.weight"
        ]
        block_tensors = [
            tensor for block in self.all_blocks for tensor in self._residual_tensors(block, width)
        ]
        yield FoldSite(
            "residual", "residual", width, width, False, (*global_tensors, *block_tensors)
        )

    def _norm_site(self, block: _Block, norm: str, readers: tuple[str, ...]) -> FoldSite:
        """Return the site of the channels between a norm and the tensors that read its output,
        which have the roles `readers`.
        """
        width = block.tensors[f"{norm}.weight"].columns
        tensors = [
            _columns(block.tensors[name], width, -1)
            for name in _weight_and_bias(norm)
            if name in block.tensors
        ]
        for role in readers:
            if (weight := block.tensors.get(f"{role}.weight")) is not None:
                reads_by_rows = role in self.wiring.row_readers
                tensors.append(
                    _rows(weight, width, 1) if reads_by_rows else _columns(weight, width, 1)
                )
        return FoldSite(f"{block.name}.{norm}", "norm", width, 0, True, tuple(tensors))

    def _hidden_site(self, block: _Block, gate: str, up: str, down: str) -> FoldSite:
        """Return the site of the channels between up and down. Each expert has its own channels."""
        reader = block.tensors[f"{down}.weight"]
        experts, group = reader.rows // reader.shape[1], reader.columns
        width, power = experts * group, 1 if self.wiring.is_linear_in_up else 0
        tensors = [_columns(reader, width, power)]
        for name in _weight_and_bias(up):
            if name in block.tensors:
                tensors.append(self._hidden_producer(block.tensors[name], width, -power, name))
                if self.wiring.has_fused_gate:
                    tensors.append(
                        self._hidden_producer(block.tensors[name], width, 0, name, first=True)
                    )
        tensors += [
            self._hidden_producer(block.tensors[name], width, 0, name)
            for name in _weight_and_bias(gate)
            if name in block.tensors
        ]
        return FoldSite(
            f"{block.name}.{down}",
            "hidden",
            width,
            group,
            self.wiring.is_linear_in_up,
            tuple(tensors),
        )

    def _hidden_producer(
        self, weight: Weight, width: int, power: int, name: str, first: bool = False
    ) -> FoldedTensor:
        """Return the rows of a weight, or the columns of a bias, that produce hidden channels. In a
        tensor that contains gate and up, these are the rows of up, or with `first` the rows of
        gate.
        """
        axis = _columns if name.endswith("bias") else _rows
        if not self.wiring.has_fused_gate:
            return axis(weight, width, power)
        return axis(weight, width, power, skip=0 if first else width, total=2 * width)

    def _value_site(self, block: _Block) -> Iterator[FoldSite]:
        """Yield the site of the channels between v and attn_output, if the shapes fit. In a tensor
        of fused q, k and v, the last rows are those of v.
        """
        import numpy as np

        reader = block.tensors.get("attn_output.weight")
        producers = [role for role in self.wiring.value_roles if f"{role}.weight" in block.tensors]
        if reader is None or len(producers) != 1 or not self.heads or reader.columns % self.heads:
            return
        producer, query_columns, head_size = (
            block.tensors[f"{producers[0]}.weight"],
            reader.columns,
            reader.columns // self.heads,
        )
        width = (
            self._value_rows(block, producer, query_columns)
            if producers[0] == "attn_qkv"
            else producer.rows
        )
        if width % head_size or not width or query_columns % width:
            return
        columns = np.arange(query_columns)
        shared = columns // head_size // (query_columns // width) * head_size + columns % head_size
        tensors = [FoldedTensor(reader.name, "columns", 1, shared[None])]
        for role in self.wiring.value_roles:
            for name in _weight_and_bias(role):
                if (weight := block.tensors.get(name)) is not None:
                    axis, size = (
                        (_columns, weight.columns)
                        if name.endswith("bias")
                        else (_rows, weight.rows)
                    )
                    tensors.append(axis(weight, width, -1, skip=size - width, total=size))
        yield FoldSite(f"{block.name}.attn_output", "value", width, head_size, True, tuple(tensors))

    def _value_rows(self, block: _Block, fused: Weight, query_rows: int) -> int:
        """Return the number of value rows in a fused tensor of queries, keys and values. The keys
        have as many rows as the values, and the queries have as many as attn_output has columns.
        """
        return (fused.rows - query_rows) // 2

    def _residual_tensors(self, block: _Block, width: int) -> Iterator[FoldedTensor]:
        """Yield the columns and rows of a block's tensors that read or write the residual
        stream.
        """
        for name, weight in block.tensors.items():
            role, ending = name.split(".")
            if role in NORM_ROLES or (role in self.wiring.readers and ending == "weight"):
                yield _columns(weight, width, 0)
            elif role in WRITER_ROLES:
                yield (_columns if ending == "bias" else _rows)(weight, width, 0)


def _weight_and_bias(role: str) -> tuple[str, str]:
    return f"{role}.weight", f"{role}.bias"


def _channels(size: int, width: int, skip: int, total: int, weight: Weight, unit: str) -> "Ints":
    """Return the channel [size] of each row or column of a tensor. The pattern repeats after
    `total` rows or columns: first `skip` of channel -1, which belong to no channel, then channels 0
    .. width - 1.

    `unit` is "rows" or "columns", for the error. Raises UserError if the size does not fit.
    """
    import numpy as np

    if size % total or (skip + width > total != width):
        raise UserError(
            f"{weight.name} has {size} {unit}, which do not fit {width} channels",
            hint="the file is damaged: download it again",
        )
    period = np.full(total, -1, np.int64)
    period[skip : skip + width] = np.arange(min(width, total - skip))
    return np.tile(period, size // total)


def _rows(weight: Weight, width: int, power: int, skip: int = 0, total: int = 0) -> FoldedTensor:
    """Return the rows of a weight that belong to a site of `width` channels. `skip` and `total` are
    explained in _channels().
    """
    return FoldedTensor(
        weight.name,
        "rows",
        power,
        _channels(weight.rows, width, skip, total or width, weight, "rows"),
    )


def _columns(weight: Weight, width: int, power: int, skip: int = 0, total: int = 0) -> FoldedTensor:
    """Return the columns of a weight that belong to a site of `width` channels. All matrices of the
    weight have the same channels, unless there are more channels than columns; then each matrix has
    its own. `skip` and `total` are explained in _channels().
    """
    size = (
        weight.columns
        if width <= weight.columns
        else weight.columns * max(1, width // weight.columns)
    )
    channels = _channels(size, width, skip, total or width, weight, "columns")
    return FoldedTensor(weight.name, "columns", power, channels.reshape(-1, weight.columns))
