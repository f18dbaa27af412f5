"""Which type each tensor of a model gets: llama.cpp's own rules, the user's wishes, the fallbacks.

Follows tensor_allows_quantization, llama_tensor_get_type and tensor_type_fallback
(src/llama-quant.cpp of llama.cpp as vendored in llama-cpp-python 0.3.36); the mixtures themselves
are tables in file_types.py. It sees names, shapes and a few numbers of the model, no weights.
Tensors are counted in the order of llama.cpp's own map, (layer, name), not in the file's.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from quant import native
from quant.errors import Refusal
from quant.file_types import (
    ALIASES,
    FALLBACK,
    FATAL,
    FILE_TYPES,
    TENSOR_TYPES,
    Facts,
    FileType,
    Place,
)

__all__ = [
    "ALIASES",
    "FILE_TYPES",
    "STOCK",
    "TENSOR_TYPES",
    "Choice",
    "Facts",
    "FileType",
    "Wishes",
    "allowed",
    "choose",
    "open_tensors",
    "order",
    "parse",
    "tensor_type",
    "types",
]

NATIVE = ("MXFP4",)  # what models were trained in: rounding it anew only loses

# Parts of a name that keep a tensor as it is (tensor_allows_quantization).
KEPT = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
)
KEPT_NAMES = ("position_embd.weight", "token_types.weight")
KEPT_GLM5 = (
    "hc_",
    "indexer.attn_q_b",
    "indexer.attn_k",
    "indexer.proj",
    "indexer_compressor_gate",
    "indexer_compressor_ape",
    "ssm_f_a.weight",
    "ssm_f_b.weight",
    "ssm_g_a.weight",
    "ssm_g_b.weight",
    "ssm_beta.weight",
    "attn_kv_a_mqa.weight",
    "attn_k_b.weight",
    "attn_v_b.weight",
)
RAISED_GLM5 = ("attn_q_a", "attn_q_b", "nextn.eh_proj")
HEAD, EMBEDDINGS = "output.weight", ("token_embd.weight", "per_layer_token_embd.weight")
# Part of a name -> role, the first that fits (tensor_get_category); the exact names above come
# before it.
ROLES = (
    ("attn_qkv.weight", "v"),
    ("attn_kv_b.weight", "v"),
    ("attn_v.weight", "v"),
    ("attn_k.weight", "k"),
    ("attn_q.weight", "q"),
    ("attn_output.weight", "out"),
    ("ffn_up", "up"),
    ("ffn_gate", "gate"),
    ("ffn_down", "down"),
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asks for beside the file type.

    `tensor_types` are REGEX=TYPE, the first that is found in a name decides; `pure` gives all other
    matrices the default type; `head` and `embedding` are the types of output.weight and
    token_embd.weight; `keep_head` leaves output.weight as the source has it. `mix` decides all of
    it instead: name -> type of every tensor that may be quantized (a plan file's, quant/mix.py).
    """

    tensor_types: tuple[str, ...] = ()
    pure: bool = False
    head: str | None = None
    embedding: str | None = None
    keep_head: bool = False
    mix: Mapping[str, str] | None = None

    @property
    def any(self) -> bool:
        """Whether the file will not be the stock one of its type."""
        return self != STOCK


STOCK = Wishes()


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor's new type, and the type its recipe wanted where the row length did not allow it."""

    type: str
    wanted: str | None = None


def parse(text: str) -> FileType:
    """Find a file type by its name in any case; Q4_K means Q4_K_M, as in llama.cpp."""
    name = text.strip().upper().replace("-", "_")
    name = ALIASES.get(name, name)
    if name not in FILE_TYPES:
        near = difflib.get_close_matches(name, FILE_TYPES, n=3, cutoff=0.5) or list(FILE_TYPES)
        raise Refusal(f"there is no type {text!r}", hint=f"try {', '.join(near)}")
    return FILE_TYPES[name]


def tensor_type(text: str) -> str:
    """Find a tensor's type by its name in any case."""
    name = text.strip().upper()
    if name not in TENSOR_TYPES:
        near = difflib.get_close_matches(name, TENSOR_TYPES, n=3, cutoff=0.5) or list(TENSOR_TYPES)
        raise Refusal(f"there is no tensor type {text!r}", hint=f"try {', '.join(near)}")
    return name


def overrides(texts: Sequence[str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Read REGEX=TYPE settings; the first pattern found in a tensor's name decides."""
    found = []
    for text in texts:
        pattern, equals, kind = text.rpartition("=")
        if not equals or not pattern:
            raise Refusal(
                f"{text!r} is not REGEX=TYPE", hint="for example --tensor-type 'attn_v=q8_0'"
            )
        try:
            found.append((re.compile(pattern), tensor_type(kind)))
        except (re.error, OverflowError, RecursionError) as error:
            raise Refusal(
                f"{pattern!r} is not a regular expression: {error}", hint="quote dots and brackets"
            ) from None
    return tuple(found)


def order(name: str) -> tuple[int, bytes]:
    """The place of a tensor in llama.cpp's map of weights: by layer (none is -1), then by name."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name.encode())


def role(name: str) -> str:
    """What a tensor is for, as far as recipes care (tensor_get_category)."""
    if name == HEAD:
        return "head"
    if name in EMBEDDINGS:
        return "embedding"
    return next((role for part, role in ROLES if part in name), "other")


def values(name: str, rows: int, facts: Facts) -> int:
    """Of the rows of a fused attn_qkv those that put out values, its last; 0 of others, and where
    it is not known.
    """
    heads = facts.heads + 2 * facts.kv_heads
    fused = (
        name.endswith(".attn_qkv.weight")
        and min(facts.heads, facts.kv_heads) > 0
        and rows % heads == 0
    )
    return rows // heads * facts.kv_heads if fused else 0


def allowed(name: str, shape: Sequence[int], facts: Facts) -> bool:
    """Whether a tensor is quantized at all: matrices named …weight, without the small and delicate
    ones.
    """
    if (
        sum(size > 1 for size in shape[1:]) == 0
        or not name.endswith("weight")
        or name in KEPT_NAMES
    ):
        return False
    kept = KEPT + KEPT_GLM5 if facts.architecture == "glm5-next" else KEPT
    return not any(part in name for part in kept)


Tensors = Sequence[tuple[str, Sequence[int], str]]


def choose(
    tensors: Tensors,
    kind: FileType,
    facts: Facts,
    wishes: Wishes = STOCK,
    *,
    weighed: Collection[str] | None = None,
) -> dict[str, Choice]:
    """Choose every tensor's type from (name, shape with the row length first, present type).

    What may not be quantized keeps its type, and so does what is stored in one that models are
    trained in, unless a wish names it. `weighed` are the tensors that an imatrix speaks of, None
    where there is none. Refuses a wish that decides nothing, and a type that is noise without an
    imatrix.
    """
    chosen = types(tensors, kind, facts, wishes, imatrix=weighed is not None)
    _blind({name: present for name, _, present in tensors}, chosen, kind, weighed)
    return chosen


def types(
    tensors: Tensors, kind: FileType, facts: Facts, wishes: Wishes = STOCK, *, imatrix: bool = False
) -> dict[str, Choice]:
    """What choose() chooses, whether it would be noise or not."""
    if wishes.mix is not None:
        return _mixed(tensors, facts, wishes)
    chooser = _Chooser(tensors, kind, facts, wishes, imatrix=imatrix)
    chosen: dict[str, Choice] = {}
    for name, shape, present in sorted(tensors, key=lambda tensor: order(tensor[0])):
        if (
            not allowed(name, shape, facts)
            or present in native.INTEGERS
            or (wishes.keep_head and name == HEAD)
        ):
            chosen[name] = Choice(present)
        else:
            chosen[name] = chooser.choose(name, shape, present)
    chooser.unheard()
    return chosen


def open_tensors(tensors: Tensors, facts: Facts) -> Tensors:
    """Those that may be quantized: the ones a mix decides."""
    return [
        (name, shape, present)
        for name, shape, present in tensors
        if allowed(name, shape, facts) and present not in native.INTEGERS
    ]


def _mixed(tensors: Tensors, facts: Facts, wishes: Wishes) -> dict[str, Choice]:
    """Each tensor's type as the mix has it; refuses one that is not of these tensors, or not for
    their rows.
    """
    if wishes != Wishes(mix=wishes.mix):
        raise Refusal(
            "a plan decides every tensor's type",
            hint="leave out --tensor-type, --pure and the like",
        )
    mix = dict(wishes.mix or {})
    chosen, wrong = {name: Choice(present) for name, _, present in tensors}, []
    for name, shape, _ in open_tensors(tensors, facts):
        kind = mix.pop(name, None)
        if kind is None:
            wrong.append(f"it says nothing of {name}")
        elif shape[0] % native.block(kind).values:
            wrong.append(f"rows of {shape[0]} do not fill the blocks of {kind}: {name}")
        else:
            chosen[name] = Choice(kind)
    wrong += [f"this model has no {name} that may be quantized" for name in mix]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Refusal(
            f"the plan is not for this model: {'; '.join(wrong[:3])}{more}",
            hint="make one from this source with --plan-out FILE",
        )
    return chosen


def fit(wanted: str, columns: int) -> Choice:
    """The type itself, or its stand-in where a row is not a whole number of its blocks; at last
    F16.
    """
    if columns % native.block(wanted).values == 0:
        return Choice(wanted)
    other = FALLBACK.get(wanted, wanted)
    if other == wanted and native.block(wanted).values > 32:
        raise Refusal(
            f"rows of {columns} do not fill the blocks of {wanted}, and nothing stands in for it",
            hint="choose another type, or --tensor-type for these tensors",
        )
    return Choice(other if columns % native.block(other).values == 0 else "F16", wanted)


def _blind(
    present: dict[str, str],
    chosen: dict[str, Choice],
    kind: FileType,
    weighed: Collection[str] | None,
) -> None:
    """Refuse what would be noise: types of very few bits for tensors that no imatrix speaks of."""
    bad = []
    for name, choice in chosen.items():
        outside = role(name) in ("head", "embedding")
        noise = choice.type in (FATAL if outside else kind.blind) and choice.type != present[name]
        if noise and (weighed is None or name not in weighed):
            bad.append(name)
    if not bad:
        return
    some = ", ".join(f"{name} ({chosen[name].type})" for name in bad[:3]) + (
        " …" if len(bad) > 3 else ""
    )
    if weighed is None:
        raise Refusal(
            f"{kind.name} needs an importance matrix: without one {len(bad)} tensors would be noise: {some}",
            hint="add --imatrix FILE, as llama-imatrix makes it, or choose a larger type",
        )
    raise Refusal(
        f"the imatrix does not speak of {len(bad)} tensors that are noise without it: {some}",
        hint="give these another type with --tensor-type, or calibrate on more text",
    )


class _Chooser:
    """Applies wishes and rules tensor by tensor, counting those of each role as llama.cpp does."""

    def __init__(
        self, tensors: Tensors, kind: FileType, facts: Facts, wishes: Wishes, *, imatrix: bool
    ) -> None:
        names = {name for name, _, _ in tensors}
        self.kind, self.facts, self.wishes, self.imatrix = kind, facts, wishes, imatrix
        self.patterns = overrides(wishes.tensor_types)
        self.head = tensor_type(wishes.head) if wishes.head else None
        self.embedding = tensor_type(wishes.embedding) if wishes.embedding else None
        self.tied = HEAD not in names
        self.values = sum(role(name) == "v" for name in names)
        self.seen = dict.fromkeys(("v", "down", "gate", "up"), 0)
        self.open: list[str] = []  # names that a pattern could have decided
        self.heard = {
            "head": self.head is None,
            "embedding": self.embedding is None,
            "keep": not wishes.keep_head,
        }
        self.heard["keep"] |= not self.tied

    def choose(self, name: str, shape: Sequence[int], present: str) -> Choice:
        part, columns = role(name), shape[0]
        manual = next((new for pattern, new in self.patterns if pattern.search(name)), None)
        # As upstream: the per-layer table follows the embedding's type unless a pattern names it.
        if part == "embedding" and self.embedding and not (manual and name != EMBEDDINGS[0]):
            self.heard["embedding"] = True
            return fit(self.embedding, columns)
        if part == "head" and self.head:
            self.heard["head"] = True
            return fit(self.head, columns)
        if present in NATIVE:
            self.open.append(name)
            return fit(manual, columns) if manual else Choice(present)
        if not native.quantized(self.kind.default):
            return Choice(self.kind.default)
        self.open.append(name)
        return fit(
            manual or (self.kind.default if self.wishes.pure else self._rule(name, part, shape)),
            columns,
        )

    def unheard(self) -> None:
        """Refuse wishes that decided nothing."""
        for pattern, _ in self.patterns:
            if not any(map(pattern.search, self.open)):
                raise Refusal(
                    f"{pattern.pattern!r} fits no tensor that {self.kind.name} would quantize",
                    hint=f"such names are: {', '.join(self.open[:3]) or 'none, the type is a float'}",
                )
        if self.wishes.keep_head and self.head:
            raise Refusal(
                "output.weight cannot both be left and get a type of its own",
                hint="give one of the two",
            )
        flags = {
            "head": "--output-tensor-type",
            "keep": "--leave-output-tensor",
            "embedding": "--token-embedding-type",
        }
        for wish in (wish for wish, heard in self.heard.items() if not heard):
            missing = (
                "no token_embd.weight" if wish == "embedding" else "no output.weight of its own"
            )
            raise Refusal(
                f"{flags[wish]} decides nothing: the model has {missing}",
                hint=f"leave it away, or use {flags['embedding']}",
            )

    def _rule(self, name: str, part: str, shape: Sequence[int]) -> str:
        default, facts, mix = self.kind.default, self.facts, self.kind.mix
        if facts.architecture == "glm5-next" and any(word in name for word in RAISED_GLM5):
            return "Q8_0"
        if part == "head" or (part == "embedding" and self.tied):
            return self._head(shape[0])
        rule = mix.get("every") or mix.get(part)
        place = self._place(name, part, shape)
        wanted = (rule(place) if callable(rule) else rule) or default
        if self.kind.low or "every" in mix:
            return wanted
        if facts.experts == 8 and part in ("v", "k"):
            return "Q8_0"
        return "Q5_K" if part == "v" and facts.seventy_b and wanted in ("Q3_K", "Q4_K") else wanted

    def _head(self, columns: int) -> str:
        if self.head:
            self.heard["head"] = True
            return self.head
        if self.facts.architecture == "falcon" or columns % native.block(self.kind.default).values:
            return "Q8_0"
        return self.kind.head

    def _place(self, name: str, part: str, shape: Sequence[int]) -> Place:
        index = self.seen.get(part, 0)
        if part in self.seen:
            self.seen[part] += 1
        if part in ("down", "gate", "up") and self.facts.experts > 1 and not self.kind.low:
            index = self._layer(name)
        count = self.values if part == "v" else self.facts.layers
        stacked = len(shape) > 2 and shape[2] > 1
        if self.facts.architecture == "bailingmoe3":  # its attention has stacked matrices too
            stacked &= part in ("down", "gate", "up")
        return Place(index, count, self.facts, self.imatrix, stacked)

    def _layer(self, name: str) -> int:
        layer = order(name)[0]
        if not 0 <= layer < self.facts.layers:
            raise Refusal(
                f"tensor {name} belongs to no layer of the {self.facts.layers} there are",
                hint="the file's block_count is wrong: fetch it again",
            )
        return layer
