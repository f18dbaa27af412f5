"""Tables of llama.cpp's file types (Q4_K_M, IQ2_XS, ...): their names and numbers, and which
tensors get another type than the default.

Source: llama_tensor_get_type_impl, llama_ftype_get_default_type and tensor_type_fallback
(src/llama-quant.cpp of the llama.cpp in llama-cpp-python 0.3.36). A new file type is a new row in
these tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# For each architecture, the number of layers of the model that llama.cpp treats as 70B.
LAYERS_OF_70B = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The properties of a model that decide the types of its tensors. `layers`, `heads`, `kv_heads`
    and `experts` are numbers; `experts` is 0 for a dense model. The last `prediction_layers` of the
    layers predict further tokens.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    prediction_layers: int = 0

    @property
    def gqa(self) -> int:
        """Number of query heads that share a key-value head; 0 without key-value heads."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp treats the model as 70B: its attn_v is small relative to the model and
        gets more bits.
        """
        if self.architecture == "llama" and (self.heads == self.kv_heads or self.experts == 8):
            return False
        return LAYERS_OF_70B.get(self.architecture) == self.layers


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """The position of a tensor among the tensors of its role (attn_v, ffn_down, ...): number
    `index` (from 0) of `count`. `is_stacked` means that the tensor contains the matrices of all
    experts.
    """

    index: int
    count: int
    facts: ModelFacts
    has_imatrix: bool = False
    is_stacked: bool = False

    @property
    def uses_more_bits(self) -> bool:
        """Whether llama.cpp's use_more_bits is true for this tensor: it is in the first or the last
        eighth of the tensors, or is every third one between.
        """
        eighth = self.count // 8
        return (
            self.index < eighth
            or self.index >= 7 * self.count // 8
            or (self.index - eighth) % 3 == 2
        )

    @property
    def is_in_middle(self) -> bool:
        """Whether the tensor is neither in the first nor in the last eighth of the tensors."""
        return self.count // 8 <= self.index < 7 * self.count // 8

    def is_in_first(self, divisor: int) -> bool:
        """Return whether the tensor is in the first 1 / `divisor` of the tensors of its role."""
        return self.index < self.count // divisor

    @property
    def has_small_values(self) -> bool:
        """Whether at least four query heads share a key-value head, so that attn_v is small."""
        return self.facts.gqa >= 4

    @property
    def is_falcon(self) -> bool:
        """Whether the architecture is Falcon, which has special rules."""
        return self.facts.architecture == "falcon"

    @property
    def has_eight_experts(self) -> bool:
        """Whether the model has eight experts (Mixtral). The experts share one attention, whose
        small matrices get more bits.
        """
        return self.facts.experts == 8


# A tensor type, or a function that returns one. None stands for the default type of the file type.
TypeRule = str | Callable[[TensorPosition], str | None]
RoleRules = Mapping[str, TypeRule]


@dataclass(frozen=True, slots=True)
class FileType:
    """One of llama.cpp's file types: its name ("Q4_K_M"), its number in llama.h
    (`general.file_type`), and the default type of its tensors.

    `rules` gives other types by role: v, k, q, out (of the attention), down, gate, up (of the
    feed-forward network), embedding (unless it is also the head), or "every" for all roles.
    `head_type` is the type of the output matrix. File types with `is_low_bit` have their own rules
    for models with eight experts or 70B parameters; all other file types get the common rules in
    tensor_types.py.
    """

    name: str
    number: int
    default_type: str
    rules: RoleRules = field(default_factory=dict)
    head_type: str = "Q6_K"
    is_low_bit: bool = False

    @property
    def flag(self) -> str:
        """The flag of `llmcli quantize` for this file type ("--q4_k_m")."""
        return "--" + self.name.lower()

    @property
    def types_needing_imatrix(self) -> frozenset[str]:
        """The tensor types that, without an imatrix, lose nearly all information in a file of this
        type (tensor_requires_imatrix).
        """
        return TYPES_NEEDING_IMATRIX | {"Q2_K"} if self.name == "Q2_K_S" else TYPES_NEEDING_IMATRIX

    @property
    def needs_imatrix(self) -> bool:
        """Whether the file type cannot be written without an imatrix."""
        return self.default_type in self.types_needing_imatrix


def _attn_output_rule(normal: str | None = None) -> TypeRule:
    """Return the rule of attn_output: the default type for Falcon, Q5_K for models with eight
    experts, else `normal` (None for the default type).
    """
    return lambda p: None if p.is_falcon else "Q5_K" if p.has_eight_experts else normal


def _low_bit_rules(sensitive: str, out: str | None, embedding: str) -> RoleRules:
    """Return the rules of a file type below three bits. Sensitive tensors get type `sensitive`,
    attn_output gets `out` (None for the default type).
    """
    return {
        "v": lambda p: "Q4_K" if p.has_small_values or p.facts.experts >= 4 else sensitive,
        "k": lambda p: "Q4_K" if p.has_eight_experts else None,
        "down": lambda p: sensitive if p.is_in_first(8) else None,
        "out": lambda p: "Q5_K" if p.has_eight_experts else out,
        "embedding": embedding,
    }


def _if_small_values(kind: str) -> TypeRule:
    """Return the rule that gives type `kind` to a small attn_v."""
    return lambda p: kind if p.has_small_values else None


def _q6_if_more_bits(p: TensorPosition) -> str | None:
    """Return Q6_K for the tensors to which llama.cpp gives more bits, else None."""
    return "Q6_K" if p.uses_more_bits else None


def _down_q3_m(p: TensorPosition) -> str:
    """Return the type of ffn_down in Q3_K_M."""
    return (
        "Q5_K" if p.is_in_first(16) else "Q4_K" if p.uses_more_bits or not p.is_falcon else "Q3_K"
    )


def _down_q4_m(p: TensorPosition) -> str | None:
    """Return the type of ffn_down in Q4_K_M, None for the default type."""
    if p.is_falcon:
        return "Q6_K" if p.is_in_first(16) else "Q5_K" if p.uses_more_bits else None
    return _q6_if_more_bits(p)


TERNARY_RULES: RoleRules = {"embedding": "Q4_K"}
Q2_K_RULES: RoleRules = {
    "v": lambda p: "Q4_K" if p.has_small_values else "Q3_K",
    "down": "Q3_K",
    "out": _attn_output_rule("Q3_K"),
}
Q2_K_S_RULES: RoleRules = {
    "v": _if_small_values("Q4_K"),
    "down": lambda p: "Q4_K" if p.is_in_first(8) else None,
}
Q3_K_M_RULES: RoleRules = {
    "v": lambda p: "Q5_K" if p.index < 2 else "Q4_K",
    "down": _down_q3_m,
    "out": _attn_output_rule("Q4_K"),
}
Q3_K_L_RULES: RoleRules = {
    "v": "Q5_K",
    "down": lambda p: "Q4_K" if p.is_falcon else "Q5_K",
    "out": lambda p: "Q4_K" if p.is_falcon else None if p.has_eight_experts else "Q5_K",
}
Q4_K_S_RULES: RoleRules = {
    "v": lambda p: "Q5_K" if p.index < 4 else None,
    "down": lambda p: "Q5_K" if p.is_in_first(8) and not p.is_falcon else None,
    "out": _attn_output_rule(),
}
Q4_K_M_RULES: RoleRules = {"v": _q6_if_more_bits, "down": _down_q4_m, "out": _attn_output_rule()}
Q5_K_M_RULES: RoleRules = {"v": _q6_if_more_bits, "down": _q6_if_more_bits}
IQ3_XXS_RULES: RoleRules = {
    "v": lambda p: "Q4_K" if p.has_small_values else "IQ3_XXS" if p.has_imatrix else "IQ3_S",
    "k": "IQ2_S",
    "q": "IQ2_S",
    "down": lambda p: None if p.has_imatrix else "Q4_K" if p.is_in_first(8) else "Q3_K",
    "out": _attn_output_rule("IQ3_S"),
    "embedding": "IQ3_S",
}
IQ3_XS_RULES: RoleRules = {
    "v": _if_small_values("Q4_K"),
    "k": "IQ3_XXS",
    "q": "IQ3_XXS",
    "gate": lambda p: "IQ3_XXS" if p.is_in_middle else None,
    "up": lambda p: "IQ3_XXS" if p.is_in_middle else None,
    "out": _attn_output_rule(),
}
IQ3_M_RULES: RoleRules = {
    "v": "Q4_K",
    "down": lambda p: (
        "Q4_K" if p.is_in_first(8) or (p.has_eight_experts and p.uses_more_bits) else None
    ),
    "out": _attn_output_rule("Q4_K"),
}
IQ4_RULES: RoleRules = {
    "v": _if_small_values("Q5_K"),
    "down": lambda p: None if p.has_imatrix or not p.is_in_first(8) else "Q5_K",
    "out": _attn_output_rule(),
}
MXFP4_MOE_RULES: RoleRules = {"every": lambda p: "MXFP4" if p.is_stacked else "Q8_0"}


def _protect_first_down(kind: str) -> RoleRules:
    """Return the rule that gives type `kind` to the first ffn_down tensors if there is an imatrix,
    because Q4_0 and Q5_0 with an imatrix can fail there.
    """
    return {"down": lambda p: kind if p.has_imatrix and p.is_in_first(8) else None}


FILE_TYPES: dict[str, FileType] = {
    kind.name: kind
    for kind in (
        FileType("Q8_0", 7, "Q8_0", head_type="Q8_0"),
        FileType("Q6_K", 18, "Q6_K"),
        FileType("Q5_K_M", 17, "Q5_K", Q5_K_M_RULES),
        FileType("Q5_K_S", 16, "Q5_K"),
        FileType("Q4_K_M", 15, "Q4_K", Q4_K_M_RULES),
        FileType("Q4_K_S", 14, "Q4_K", Q4_K_S_RULES),
        FileType("Q3_K_L", 13, "Q3_K", Q3_K_L_RULES),
        FileType("Q3_K_M", 12, "Q3_K", Q3_K_M_RULES),
        FileType("Q3_K_S", 11, "Q3_K", {"out": _attn_output_rule()}),
        FileType("Q2_K", 10, "Q2_K", Q2_K_RULES),
        FileType("Q2_K_S", 21, "Q2_K", Q2_K_S_RULES),
        FileType("Q5_1", 9, "Q5_1"),
        FileType("Q5_0", 8, "Q5_0", _protect_first_down("Q5_1")),
        FileType("Q4_1", 3, "Q4_1"),
        FileType("Q4_0", 2, "Q4_0", _protect_first_down("Q4_1")),
        FileType("IQ4_NL", 25, "IQ4_NL", IQ4_RULES),
        FileType("IQ4_XS", 30, "IQ4_XS", IQ4_RULES),
        FileType("IQ3_M", 27, "IQ3_S", IQ3_M_RULES),
        FileType("IQ3_S", 26, "IQ3_S", {"v": _if_small_values("Q4_K"), "out": _attn_output_rule()}),
        FileType("IQ3_XS", 22, "IQ3_S", IQ3_XS_RULES),
        FileType("IQ3_XXS", 23, "IQ3_XXS", IQ3_XXS_RULES, head_type="Q5_K"),
        FileType(
            "IQ2_M",
            29,
            "IQ2_S",
            _low_bit_rules("IQ3_S", "IQ3_S", "IQ3_S"),
            head_type="Q5_K",
            is_low_bit=True,
        ),
        FileType(
            "IQ2_S",
            28,
            "IQ2_XS",
            _low_bit_rules("IQ3_S", "IQ3_S", "IQ3_S"),
            head_type="Q5_K",
            is_low_bit=True,
        ),
        FileType(
            "IQ2_XS",
            20,
            "IQ2_XS",
            _low_bit_rules("Q2_K", None, "Q2_K"),
            head_type="Q5_K",
            is_low_bit=True,
        ),
        FileType(
            "IQ2_XXS",
            19,
            "IQ2_XXS",
            _low_bit_rules("Q2_K", None, "Q2_K"),
            head_type="Q5_K",
            is_low_bit=True,
        ),
        FileType(
            "IQ1_M",
            31,
            "IQ1_M",
            _low_bit_rules("Q2_K", "IQ2_XXS", "Q2_K"),
            head_type="Q5_K",
            is_low_bit=True,
        ),
        FileType(
            "IQ1_S",
            24,
            "IQ1_S",
            _low_bit_rules("Q2_K", "IQ2_XXS", "Q2_K"),
            head_type="Q5_K",
            is_low_bit=True,
        ),
        FileType("TQ2_0", 37, "TQ2_0", TERNARY_RULES),
        FileType("TQ1_0", 36, "TQ1_0", TERNARY_RULES),
        FileType("Q2_0", 41, "Q2_0", TERNARY_RULES),
        FileType("Q1_0", 40, "Q1_0"),
        FileType("NVFP4", 39, "NVFP4"),
        FileType("MXFP4", 38, "MXFP4"),
        FileType("MXFP4_MOE", 38, "MXFP4", MXFP4_MOE_RULES, head_type="Q8_0"),
        FileType("BF16", 32, "BF16"),
        FileType("F16", 1, "F16"),
        FileType("F32", 0, "F32"),
    )
}
# File types that llama-quantize does not offer: all matrices get a tensor type that llama.cpp runs.
# llama.h has a number for NVFP4 only; MXFP4 gets that of MXFP4_MOE.
OWN_FILE_TYPES = ("NVFP4", "MXFP4")
# File types that only convert to floats, as in tools/quantize/quantize.cpp.
FLOAT_FILE_TYPES = ("F32", "F16", "BF16")
FILE_TYPE_ALIASES = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}
# The types that ggml_quantize_chunk can write.
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
# Type -> the type that replaces it in tensors whose row length its block size does not divide.
FALLBACK_TYPES = {
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "Q2_0"), "Q4_0"),
    **dict.fromkeys(
        ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
    ),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "NVFP4": "MXFP4",
}
# Tensor types that lose nearly all information without an imatrix, and those among them on which
# ggml aborts without one.
TYPES_NEEDING_IMATRIX = frozenset({"IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"})
TYPES_ABORTING_WITHOUT_IMATRIX = frozenset({"IQ2_XS", "IQ2_XXS", "IQ1_S"})
