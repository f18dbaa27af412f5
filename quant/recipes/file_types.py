"""File types as tables: their names, and which tensors get another type than the default.

Source: llama_tensor_get_type_impl, llama_ftype_get_default_type and tensor_type_fallback
(src/llama-quant.cpp of the llama.cpp in llama-cpp-python 0.3.36). A new file type is a new row
here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# Number of layers of the models that llama.cpp treats as 70B, by architecture.
SEVENTY_B = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of a model that the rules need."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int

    @property
    def gqa(self) -> int:
        """Query heads for each key-value head; 0 without key-value heads."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def seventy_b(self) -> bool:
        """Whether llama.cpp treats the model as 70B, whose small attn_v gets more bits."""
        if self.architecture == "llama" and (self.heads == self.kv_heads or self.experts == 8):
            return False
        return SEVENTY_B.get(self.architecture) == self.layers


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a tensor among those of its role: `index` of `count`. `is_stacked` means that
    it contains the matrices of all experts.
    """

    index: int
    count: int
    facts: Facts
    imatrix: bool = False
    stacked: bool = False

    @property
    def more(self) -> bool:
        """Whether llama.cpp's use_more_bits is true: the first and last eighth, and every third
        between.
        """
        eighth = self.count // 8
        return (
            self.index < eighth
            or self.index >= 7 * self.count // 8
            or (self.index - eighth) % 3 == 2
        )

    @property
    def middle(self) -> bool:
        """Whether the tensor is neither in the first nor in the last eighth."""
        return self.count // 8 <= self.index < 7 * self.count // 8

    def among(self, part: int) -> bool:
        """Return whether the tensor is in the first 1/part."""
        return self.index < self.count // part

    @property
    def wide(self) -> bool:
        """Whether four or more query heads share a key-value head, so that attn_v is small."""
        return self.facts.gqa >= 4

    @property
    def falcon(self) -> bool:
        """Whether the architecture is Falcon, which has special rules."""
        return self.facts.architecture == "falcon"

    @property
    def eight(self) -> bool:
        """Whether the model has eight experts (Mixtral): they share one attention, whose small
        matrices get more bits.
        """
        return self.facts.experts == 8


Rule = str | Callable[[Place], str | None]  # None: the default type of the file type applies
Mix = Mapping[str, Rule]


@dataclass(frozen=True, slots=True)
class FileType:
    """One `general.file_type`: its number in llama.h, and the default type of its tensors.

    `rules` gives other types by role: v, k, q, out (attention), down, gate, up (feed-forward),
    embedding (if it is not the head as well), or every. `head_type` is the type of the output
    matrix. Types with `is_low_bit` have their own rules for models with eight experts or 70B
    parameters; the others get the common rules in tensor_types.py.
    """

    name: str
    number: int
    default: str
    mix: Mix = field(default_factory=dict)
    head: str = "Q6_K"
    low: bool = False

    @property
    def flag(self) -> str:
        """Command-line flag."""
        return "--" + self.name.lower()

    @property
    def blind(self) -> frozenset[str]:
        """The tensor types that lose nearly all information in such a file without an imatrix
        (tensor_requires_imatrix).
        """
        return BLIND | {"Q2_K"} if self.name == "Q2_K_S" else BLIND

    @property
    def needs_imatrix(self) -> bool:
        """Whether the file type cannot be written without an imatrix."""
        return self.default in self.blind


def _attn_output_rule(normal: str | None = None) -> Rule:
    """Return the rule of attn_output: the default for Falcon, Q5_K for eight experts."""
    return lambda p: None if p.falcon else "Q5_K" if p.eight else normal


def _low_bit_rules(few: str, out: str | None, embedding: str) -> Mix:
    """Return the rules of the file types below three bits; `few` is the type of their sensitive
    tensors.
    """
    return {
        "v": lambda p: "Q4_K" if p.wide or p.facts.experts >= 4 else few,
        "k": lambda p: "Q4_K" if p.eight else None,
        "down": lambda p: few if p.among(8) else None,
        "out": lambda p: "Q5_K" if p.eight else out,
        "embedding": embedding,
    }


def _if_small_values(kind: str) -> Rule:
    return lambda p: kind if p.wide else None


def _q6_if_more_bits(p: Place) -> str | None:
    return "Q6_K" if p.more else None


def _down_q3_m(p: Place) -> str:
    return "Q5_K" if p.among(16) else "Q4_K" if p.more or not p.falcon else "Q3_K"


def _down_q4_m(p: Place) -> str | None:
    if p.falcon:
        return "Q6_K" if p.among(16) else "Q5_K" if p.more else None
    return _q6_if_more_bits(p)


TERNARY: Mix = {"embedding": "Q4_K"}
Q2_K: Mix = {
    "v": lambda p: "Q4_K" if p.wide else "Q3_K",
    "down": "Q3_K",
    "out": _attn_output_rule("Q3_K"),
}
Q2_K_S: Mix = {"v": _if_small_values("Q4_K"), "down": lambda p: "Q4_K" if p.among(8) else None}
Q3_K_M: Mix = {
    "v": lambda p: "Q5_K" if p.index < 2 else "Q4_K",
    "down": _down_q3_m,
    "out": _attn_output_rule("Q4_K"),
}
Q3_K_L: Mix = {
    "v": "Q5_K",
    "down": lambda p: "Q4_K" if p.falcon else "Q5_K",
    "out": lambda p: "Q4_K" if p.falcon else None if p.eight else "Q5_K",
}
Q4_K_S: Mix = {
    "v": lambda p: "Q5_K" if p.index < 4 else None,
    "down": lambda p: "Q5_K" if p.among(8) and not p.falcon else None,
    "out": _attn_output_rule(),
}
Q4_K_M: Mix = {"v": _q6_if_more_bits, "down": _down_q4_m, "out": _attn_output_rule()}
Q5_K_M: Mix = {"v": _q6_if_more_bits, "down": _q6_if_more_bits}
IQ3_XXS: Mix = {
    "v": lambda p: "Q4_K" if p.wide else "IQ3_XXS" if p.imatrix else "IQ3_S",
    "k": "IQ2_S",
    "q": "IQ2_S",
    "down": lambda p: None if p.imatrix else "Q4_K" if p.among(8) else "Q3_K",
    "out": _attn_output_rule("IQ3_S"),
    "embedding": "IQ3_S",
}
IQ3_XS: Mix = {
    "v": _if_small_values("Q4_K"),
    "k": "IQ3_XXS",
    "q": "IQ3_XXS",
    "gate": lambda p: "IQ3_XXS" if p.middle else None,
    "up": lambda p: "IQ3_XXS" if p.middle else None,
    "out": _attn_output_rule(),
}
IQ3_M: Mix = {
    "v": "Q4_K",
    "down": lambda p: "Q4_K" if p.among(8) or (p.eight and p.more) else None,
    "out": _attn_output_rule("Q4_K"),
}
IQ4: Mix = {
    "v": _if_small_values("Q5_K"),
    "down": lambda p: None if p.imatrix or not p.among(8) else "Q5_K",
    "out": _attn_output_rule(),
}
MXFP4_MOE: Mix = {"every": lambda p: "MXFP4" if p.stacked else "Q8_0"}


def _protect_first_down(kind: str) -> Mix:
    """Return the rule that protects the first ffn_down tensors, where Q4_0 and Q5_0 with an imatrix
    can fail.
    """
    return {"down": lambda p: kind if p.imatrix and p.among(8) else None}


FILE_TYPES: dict[str, FileType] = {
    kind.name: kind
    for kind in (
        FileType("Q8_0", 7, "Q8_0", head="Q8_0"),
        FileType("Q6_K", 18, "Q6_K"),
        FileType("Q5_K_M", 17, "Q5_K", Q5_K_M),
        FileType("Q5_K_S", 16, "Q5_K"),
        FileType("Q4_K_M", 15, "Q4_K", Q4_K_M),
        FileType("Q4_K_S", 14, "Q4_K", Q4_K_S),
        FileType("Q3_K_L", 13, "Q3_K", Q3_K_L),
        FileType("Q3_K_M", 12, "Q3_K", Q3_K_M),
        FileType("Q3_K_S", 11, "Q3_K", {"out": _attn_output_rule()}),
        FileType("Q2_K", 10, "Q2_K", Q2_K),
        FileType("Q2_K_S", 21, "Q2_K", Q2_K_S),
        FileType("Q5_1", 9, "Q5_1"),
        FileType("Q5_0", 8, "Q5_0", _protect_first_down("Q5_1")),
        FileType("Q4_1", 3, "Q4_1"),
        FileType("Q4_0", 2, "Q4_0", _protect_first_down("Q4_1")),
        FileType("IQ4_NL", 25, "IQ4_NL", IQ4),
        FileType("IQ4_XS", 30, "IQ4_XS", IQ4),
        FileType("IQ3_M", 27, "IQ3_S", IQ3_M),
        FileType("IQ3_S", 26, "IQ3_S", {"v": _if_small_values("Q4_K"), "out": _attn_output_rule()}),
        FileType("IQ3_XS", 22, "IQ3_S", IQ3_XS),
        FileType("IQ3_XXS", 23, "IQ3_XXS", IQ3_XXS, head="Q5_K"),
        FileType(
            "IQ2_M", 29, "IQ2_S", _low_bit_rules("IQ3_S", "IQ3_S", "IQ3_S"), head="Q5_K", low=True
        ),
        FileType(
            "IQ2_S", 28, "IQ2_XS", _low_bit_rules("IQ3_S", "IQ3_S", "IQ3_S"), head="Q5_K", low=True
        ),
        FileType(
            "IQ2_XS", 20, "IQ2_XS", _low_bit_rules("Q2_K", None, "Q2_K"), head="Q5_K", low=True
        ),
        FileType(
            "IQ2_XXS", 19, "IQ2_XXS", _low_bit_rules("Q2_K", None, "Q2_K"), head="Q5_K", low=True
        ),
        FileType(
            "IQ1_M", 31, "IQ1_M", _low_bit_rules("Q2_K", "IQ2_XXS", "Q2_K"), head="Q5_K", low=True
        ),
        FileType(
            "IQ1_S", 24, "IQ1_S", _low_bit_rules("Q2_K", "IQ2_XXS", "Q2_K"), head="Q5_K", low=True
        ),
        FileType("TQ2_0", 37, "TQ2_0", TERNARY),
        FileType("TQ1_0", 36, "TQ1_0", TERNARY),
        FileType("Q2_0", 41, "Q2_0", TERNARY),
        FileType("Q1_0", 40, "Q1_0"),
        FileType("MXFP4_MOE", 38, "MXFP4", MXFP4_MOE, head="Q8_0"),
        FileType("BF16", 32, "BF16"),
        FileType("F16", 1, "F16"),
        FileType("F32", 0, "F32"),
    )
}
# as in tools/quantize/quantize.cpp
ALIASES = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}
# The types that ggml_quantize_chunk can write, the largest first.
TENSOR_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q6_K",
    "Q5_K",
    "Q4_K",
    "Q3_K",
    "Q2_K",
    "Q5_1",
    "Q5_0",
    "Q4_1",
    "Q4_0",
    "IQ4_NL",
    "IQ4_XS",
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "IQ1_M",
    "IQ1_S",
    "TQ2_0",
    "TQ1_0",
    "MXFP4",
    "NVFP4",
    "Q2_0",
    "Q1_0",
)
# The replacement of a type whose block size does not divide the row length.
FALLBACK = {
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "Q2_0"), "Q4_0"),
    **dict.fromkeys(
        ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
    ),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
# Tensor types that lose nearly all information without an imatrix, and those on which ggml then
# aborts.
BLIND = frozenset({"IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"})
FATAL = frozenset({"IQ2_XS", "IQ2_XXS", "IQ1_S"})
