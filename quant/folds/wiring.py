"""Which channels of a model are free, by architecture: read off llama.cpp's graphs
(src/models/*.cpp), never guessed.

  norm      a norm's weight (and bias) / s, the columns of all that reads it * s: attention's, the
  feed-forward's with
            router and shared experts, and inside MLA those of the compressed queries and keys
  hidden    rows of up / s, columns of down * s, per expert; gate, up and down may be permuted. Not
  rescaled where
            the activation is not linear in up (gpt-oss clamps it)
  value     rows of v / s, columns of attn_output * s, one factor for all query heads of a key-value
  head; permuted
            within a head
  head      the last norm / s, the head's columns * s; none where the head is tied to the embedding
  residual  one permutation of everything the residual stream is read by and written to, tied
  embeddings included

A tied embedding has no free factors: RMSNorm does not commute with factors of channels, and the
residual carries embeddings on unchanged; only an order (and one factor of the whole model, and
signs) is free there. Queries against keys have free factors too, but these scale whole rows, which
every block format follows anyway: left out. What is not in the table is refused by name; a block
with a tensor that the table does not know stays as it is.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quant.errors import Refusal
from quant.folds.fold import Part, Site
from quant.recipe import NATIVE
from quant.source import Source, Weight

if TYPE_CHECKING:
    from quant.folds.fold import Ints

QKV = ("attn_q", "attn_k", "attn_v", "attn_qkv")
FORWARD = (
    "ffn_gate",
    "ffn_up",
    "ffn_gate_inp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_gate_inp_shexp",
    "ffn_gate_shexp",
    "ffn_up_shexp",
)
HIDDEN = tuple(
    (f"ffn_gate{end}", f"ffn_up{end}", f"ffn_down{end}") for end in ("", "_exps", "_shexp")
)
BESIDE = (
    "attn_q_norm",
    "attn_k_norm",
    "attn_sinks",
    "exp_probs_b",
)  # in a block, without channels of their own
AROUND = ("rope_freqs", "rope_factors_long", "rope_factors_short")
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")  # as wide as the residual
WRITERS = ("attn_output", *(down for _, _, down in HIDDEN))
BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")
PLAIN = re.compile(r"([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True)
class Wiring:
    """One graph's table: norm -> what reads it (`mirrored`: by rows), where values are made, what
    up does.

    `fused` says that up holds gate and up, gate first; `linear` that the hidden channels are linear
    in up.
    """

    norms: Mapping[str, tuple[str, ...]]
    value: tuple[str, ...] = ("attn_v", "attn_qkv")
    mirrored: frozenset[str] = frozenset()
    fused: bool = False
    linear: bool = True
    readers: tuple[str, ...] = (*QKV, *FORWARD)
    inner: tuple[str, ...] = field(default=())  # tensors between other tensors than the residual

    @property
    def known(self) -> frozenset[str]:
        """Every role a block may have."""
        return frozenset((*self.readers, *self.inner, *NORMS, *WRITERS, *BESIDE))


GATED = Wiring({"attn_norm": QKV, "ffn_norm": FORWARD})
FUSED = replace(GATED, fused=True)
OPEN_AI = replace(GATED, norms={"attn_norm": QKV, "post_attention_norm": FORWARD}, linear=False)
LATENT = Wiring(
    {
        "attn_norm": ("attn_q", "attn_q_a", "attn_kv_a_mqa"),
        "ffn_norm": FORWARD,
        "attn_q_a_norm": ("attn_q_b",),
        "attn_kv_a_norm": ("attn_kv_b", "attn_v_b", "attn_k_b"),
    },
    value=("attn_v_b",),
    mirrored=frozenset({"attn_k_b"}),
    readers=("attn_q", "attn_q_a", "attn_kv_a_mqa", *FORWARD),
    inner=("attn_q_a_norm", "attn_q_b", "attn_kv_a_norm", "attn_kv_b", "attn_k_b", "attn_v_b"),
)
WIRINGS: dict[str, Wiring] = {
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
        GATED,
    ),
    "phi3": FUSED,
    "glm4": FUSED,
    "olmo2": replace(GATED, norms={}),
    "gpt-oss": OPEN_AI,
    "deepseek2": LATENT,
}


def sites(source: Source) -> tuple[Site, ...]:
    """All sites of a model, block by block; refuses an architecture that the table does not know,
    by name.

    Tensors in a type that models are trained in (MXFP4) stay as they are, and so does what hangs on
    them.
    """
    architecture = source.facts.architecture
    if (wiring := WIRINGS.get(architecture)) is None:
        raise Refusal(
            f"it is not known which channels of a {architecture} are free",
            hint=f"what can be folded are {', '.join(sorted(WIRINGS))}; leave --fold out",
        )
    model = _Model(source, wiring)
    found = [site for block in model.blocks.values() for site in model.inside(block)]
    return tuple(site for site in [*found, *model.outside()] if model.free(site))


@dataclass(frozen=True)
class _Block:
    """One block's tensors by role and ending: "attn_q.weight"."""

    name: str
    tensors: Mapping[str, Weight]


class _Model:
    """A source's tensors, sorted into blocks that the wiring knows and the rest."""

    def __init__(self, source: Source, wiring: Wiring) -> None:
        self.wiring, self.heads = wiring, source.facts.heads
        self.weights = {weight.name: weight for weight in source.weights}
        blocks: dict[str, dict[str, Weight]] = {}
        self.strange: set[str] = set()  # blocks, or tensors outside of them, that are not known
        around = {"token_embd", "output_norm", "output", *AROUND}
        for name, weight in self.weights.items():
            if match := BLOCK.fullmatch(name):
                blocks.setdefault(f"blk.{match[1]}", {})[f"{match[2]}.{match[3]}"] = weight
            stem = f"blk.{name.split('.')[1]}" if name.startswith("blk.") else name
            known = (
                match[2] in wiring.known
                if match
                else bool((m := PLAIN.fullmatch(name)) and m[1] in around)
            )
            if not known:
                self.strange.add(stem)
        self.all = [_Block(name, tensors) for name, tensors in blocks.items()]
        self.blocks = {block.name: block for block in self.all if block.name not in self.strange}

    def free(self, site: Site) -> bool:
        """Whether none of its tensors must stay as it is."""
        return not any(self.weights[part.name].type in NATIVE for part in site.parts)

    def inside(self, block: _Block) -> Iterator[Site]:
        """A block's sites."""
        for norm, readers in self.wiring.norms.items():
            if f"{norm}.weight" in block.tensors:
                yield self._norm(block, norm, readers)
        for gate, up, down in HIDDEN:
            if {f"{up}.weight", f"{down}.weight"} <= block.tensors.keys():
                yield self._hidden(block, gate, up, down)
        yield from self._value(block)

    def outside(self) -> Iterator[Site]:
        """The head and the residual, where nothing unknown is there that might read them, too."""
        if self.strange:
            return
        norms = [self.weights[name] for name in _both("output_norm") if name in self.weights]
        if not norms:
            return
        width, head = norms[0].columns, self.weights.get("output.weight")
        if head is not None:
            parts = [_columns(weight, width, -1) for weight in norms]
            yield Site("head", "head", width, 0, True, (*parts, _columns(head, width, 1)))
        ends = [
            _columns(weight, width, 0)
            for name, weight in self.weights.items()
            if name.split(".")[0] in ("token_embd", "output_norm") or name == "output.weight"
        ]
        inner = [part for block in self.all for part in self._residual(block, width)]
        yield Site("residual", "residual", width, width, False, (*ends, *inner))

    def _norm(self, block: _Block, norm: str, readers: tuple[str, ...]) -> Site:
        width = block.tensors[f"{norm}.weight"].columns
        parts = [
            _columns(block.tensors[name], width, -1)
            for name in _both(norm)
            if name in block.tensors
        ]
        for role in readers:
            if (weight := block.tensors.get(f"{role}.weight")) is not None:
                mirrored = role in self.wiring.mirrored
                parts.append(_rows(weight, width, 1) if mirrored else _columns(weight, width, 1))
        return Site(f"{block.name}.{norm}", "norm", width, 0, True, tuple(parts))

    def _hidden(self, block: _Block, gate: str, up: str, down: str) -> Site:
        """Channels between up and down, each expert's own."""
        reader = block.tensors[f"{down}.weight"]
        experts, group = reader.rows // reader.shape[1], reader.columns
        width, power = experts * group, 1 if self.wiring.linear else 0
        parts = [_columns(reader, width, power)]
        for name in _both(up):
            if name in block.tensors:
                parts.append(self._made(block.tensors[name], width, -power, name))
                if self.wiring.fused:
                    parts.append(self._made(block.tensors[name], width, 0, name, first=True))
        parts += [
            self._made(block.tensors[name], width, 0, name)
            for name in _both(gate)
            if name in block.tensors
        ]
        return Site(
            f"{block.name}.{down}", "hidden", width, group, self.wiring.linear, tuple(parts)
        )

    def _made(self, weight: Weight, width: int, power: int, name: str, first: bool = False) -> Part:
        """Rows of a weight, or columns of a bias, that make hidden channels; where gate and up are
        one, up's half.
        """
        axis = _columns if name.endswith("bias") else _rows
        if not self.wiring.fused:
            return axis(weight, width, power)
        return axis(weight, width, power, skip=0 if first else width, total=2 * width)

    def _value(self, block: _Block) -> Iterator[Site]:
        """Channels between v and attn_output: rows of v, or the last rows of fused q, k and v."""
        import numpy as np

        reader = block.tensors.get("attn_output.weight")
        makers = [role for role in self.wiring.value if f"{role}.weight" in block.tensors]
        if reader is None or len(makers) != 1 or not self.heads or reader.columns % self.heads:
            return
        maker, wide, head = (
            block.tensors[f"{makers[0]}.weight"],
            reader.columns,
            reader.columns // self.heads,
        )
        width = self._narrow(block, maker, wide) if makers[0] == "attn_qkv" else maker.rows
        if width % head or not width or wide % width:
            return
        columns = np.arange(wide)
        shared = columns // head // (wide // width) * head + columns % head
        parts = [Part(reader.name, "columns", 1, shared[None])]
        for role in self.wiring.value:
            for name in _both(role):
                if (weight := block.tensors.get(name)) is not None:
                    axis, size = (
                        (_columns, weight.columns)
                        if name.endswith("bias")
                        else (_rows, weight.rows)
                    )
                    parts.append(axis(weight, width, -1, skip=size - width, total=size))
        yield Site(f"{block.name}.attn_output", "value", width, head, True, tuple(parts))

    def _narrow(self, block: _Block, fused: Weight, wide: int) -> int:
        """Rows of values in fused queries, keys and values, whose heads are alike."""
        return (fused.rows - wide) // 2

    def _residual(self, block: _Block, width: int) -> Iterator[Part]:
        for name, weight in block.tensors.items():
            role, ending = name.split(".")
            if role in NORMS or (role in self.wiring.readers and ending == "weight"):
                yield _columns(weight, width, 0)
            elif role in WRITERS:
                yield (_columns if ending == "bias" else _rows)(weight, width, 0)


def _both(role: str) -> tuple[str, str]:
    return f"{role}.weight", f"{role}.bias"


def _channels(size: int, width: int, skip: int, total: int, weight: Weight, what: str) -> "Ints":
    """Channels [size]: 0 up to the width, as often as they fit, behind `skip` others of every
    `total`.
    """
    import numpy as np

    if size % total or (skip + width > total != width):
        raise Refusal(
            f"{weight.name} has {size} {what}, which do not fit {width} channels",
            hint="the file is damaged: fetch it again",
        )
    one = np.full(total, -1, np.int64)
    one[skip : skip + width] = np.arange(min(width, total - skip))
    return np.tile(one, size // total)


def _rows(weight: Weight, width: int, power: int, skip: int = 0, total: int = 0) -> Part:
    return Part(
        weight.name,
        "rows",
        power,
        _channels(weight.rows, width, skip, total or width, weight, "rows"),
    )


def _columns(weight: Weight, width: int, power: int, skip: int = 0, total: int = 0) -> Part:
    """Columns of a weight: the same channels in all its matrices, or each matrix's own where they
    are more.
    """
    size = (
        weight.columns
        if width <= weight.columns
        else weight.columns * max(1, width // weight.columns)
    )
    found = _channels(size, width, skip, total or width, weight, "columns")
    return Part(weight.name, "columns", power, found.reshape(-1, weight.columns))
