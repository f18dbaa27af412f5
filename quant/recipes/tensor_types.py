"""Chooses the type of each tensor of a model by llama.cpp's own rules and the user's overrides. A
type whose blocks do not fit a tensor's rows is replaced.

The rules count the tensors of a role. As in llama.cpp, tensors are counted in the order of its map,
which is by layer and name, not in the order of the file.

Source: tensor_allows_quantization, llama_tensor_get_type and tensor_type_fallback
(src/llama-quant.cpp of the llama.cpp in llama-cpp-python 0.3.36). The rules of each file type are
the tables in file_types.py.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from quant.errors import UserError, list_first
from quant.native import ggml
from quant.recipes.file_types import (
    FALLBACK_TYPES,
    FILE_TYPE_ALIASES,
    FILE_TYPES,
    TENSOR_TYPES,
    TYPES_ABORTING_WITHOUT_IMATRIX,
    FileType,
    ModelFacts,
    TensorPosition,
)

# Types that models are trained in, or stored in without floats. A tensor in such a type keeps it,
# because rounding it again only loses information.
TRAINED_TYPES = ("MXFP4",)

# Parts of the names of tensors that are not quantized (tensor_allows_quantization).
UNQUANTIZED_PARTS = (
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
UNQUANTIZED_NAMES = ("position_embd.weight", "token_types.weight")
UNQUANTIZED_PARTS_GLM5 = (
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
Q8_PARTS_GLM5 = ("attn_q_a", "attn_q_b", "nextn.eh_proj")
FEED_FORWARD_ROLES = ("down", "gate", "up")
COUNTED_ROLES = ("v", *FEED_FORWARD_ROLES)
# The type of quantized tensors of layers that predict further tokens, if no statistics guide their
# rounding: a calibration of the model does not run these layers, and drafts must be exact.
PREDICTION_TYPE = "Q8_0"
# Roles whose weights multiply the same input, and have no other role's between them.
GROUP_OF_ROLE = {"q": "qk", "k": "qk", "gate": "gate_up", "up": "gate_up"}
HEAD_NAME, EMBEDDING_NAMES = "output.weight", ("token_embd.weight", "per_layer_token_embd.weight")
# (part of a tensor's name, role). The exact names above take precedence; then the first part that
# is found in the name decides (tensor_get_category).
ROLE_OF_PART = (
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
class TypeOverrides:
    """The user's settings that change the types of a file type.

    - `tensor_types`: texts REGEX=TYPE. The first regex that is found in a tensor's name decides the
      tensor's type.
    - `pure`: all other matrices get the default type of the file type.
    - `head_type`, `embedding_type`: the types of output.weight and token_embd.weight.
    - `keep_head`: output.weight is copied from the source.
    - `mix`: the type of every quantizable tensor by name, from a plan file (plan_file.py). It
      replaces all settings above.
    """

    tensor_types: tuple[str, ...] = ()
    pure: bool = False
    head_type: str | None = None
    embedding_type: str | None = None
    keep_head: bool = False
    mix: Mapping[str, str] | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is any override, so that the file differs from a standard file of its
        type.
        """
        return self != NO_OVERRIDES


NO_OVERRIDES = TypeOverrides()


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """A tensor's new type. `replaced_type` is the type that the rules chose, if it was replaced
    because its blocks do not fit the tensor's rows; else None.
    """

    type: str
    replaced_type: str | None = None


def parse_file_type(text: str) -> FileType:
    """Return the file type with this name, in upper or lower case. "Q4_K" means Q4_K_M, as in
    llama.cpp. Raises UserError if it is unknown.
    """
    name = text.strip().upper().replace("-", "_")
    name = FILE_TYPE_ALIASES.get(name, name)
    if name not in FILE_TYPES:
        suggestions = difflib.get_close_matches(name, FILE_TYPES, n=3, cutoff=0.5) or list(
            FILE_TYPES
        )
        raise UserError(f"there is no type {text!r}", hint=f"try {', '.join(suggestions)}")
    return FILE_TYPES[name]


def parse_tensor_type(text: str) -> str:
    """Return the tensor type with this name in capitals, which `text` may write in lower case.
    Raises UserError if it is unknown.
    """
    name = text.strip().upper()
    if name not in TENSOR_TYPES:
        suggestions = difflib.get_close_matches(name, TENSOR_TYPES, n=3, cutoff=0.5) or list(
            TENSOR_TYPES
        )
        raise UserError(f"there is no tensor type {text!r}", hint=f"try {', '.join(suggestions)}")
    return name


def parse_overrides(texts: Sequence[str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Parse the texts REGEX=TYPE. Return (pattern, type) for each, in order. Raises UserError if
    one is invalid.
    """
    patterns = []
    for text in texts:
        pattern, equals, kind = text.rpartition("=")
        if not equals or not pattern:
            raise UserError(
                f"{text!r} is not REGEX=TYPE", hint="for example --tensor-type 'attn_v=q8_0'"
            )
        try:
            patterns.append((re.compile(pattern), parse_tensor_type(kind)))
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(
                f"{pattern!r} is not a regular expression: {error}", hint="quote dots and brackets"
            ) from None
    return tuple(patterns)


def tensor_order(name: str) -> tuple[int, bytes]:
    """Return the sort key of a tensor in llama.cpp's map of weights: its layer (-1 if it has none),
    then its name as bytes.
    """
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name.encode())


def tensor_role(name: str) -> str:
    """Return the role of a tensor in the rules of file types (tensor_get_category): "v", "down",
    "head", ..., or "other".
    """
    if name == HEAD_NAME:
        return "head"
    if name in EMBEDDING_NAMES:
        return "embedding"
    return next((role for part, role in ROLE_OF_PART if part in name), "other")


def is_in_prediction_layer(name: str, facts: ModelFacts) -> bool:
    """Return whether a tensor belongs to a layer that predicts further tokens."""
    return tensor_order(name)[0] >= facts.layers - facts.prediction_layers


def value_rows(name: str, rows: int, facts: ModelFacts) -> int:
    """Return the number of rows of a fused attn_qkv that produce values, which are its last rows.
    Return 0 for any other tensor, or if the number is unknown.

    `rows` is the number of all rows of the tensor.
    """
    heads = facts.heads + 2 * facts.kv_heads
    fused = (
        name.endswith(".attn_qkv.weight")
        and min(facts.heads, facts.kv_heads) > 0
        and rows % heads == 0
    )
    return rows // heads * facts.kv_heads if fused else 0


def is_quantizable(name: str, shape: Sequence[int], facts: ModelFacts) -> bool:
    """Return whether a tensor may be quantized at all: it must be a matrix, its name must end in
    "weight", and its role must not be one that llama.cpp leaves unquantized.
    """
    if (
        sum(size > 1 for size in shape[1:]) == 0
        or not name.endswith("weight")
        or name in UNQUANTIZED_NAMES
    ):
        return False
    unquantized_parts = (
        UNQUANTIZED_PARTS + UNQUANTIZED_PARTS_GLM5
        if facts.architecture == "glm5-next"
        else UNQUANTIZED_PARTS
    )
    return not any(part in name for part in unquantized_parts)


TensorTable = Sequence[tuple[str, Sequence[int], str]]


def choose_types(
    tensors: TensorTable,
    kind: FileType,
    facts: ModelFacts,
    overrides: TypeOverrides = NO_OVERRIDES,
    *,
    with_importance: Collection[str] | None = None,
) -> dict[str, TypeChoice]:
    """Choose every tensor's type. `tensors` are (name, shape with the row length first, present
    type).

    Tensors that may not be quantized keep their type. So do tensors in a type that models are
    trained in, unless an override names them. `with_importance` has the names of the tensors for
    which the imatrix has data; it is None if there is no imatrix. Raises UserError if an override
    has no effect, or if a type needs an imatrix that has no data for the tensor.
    """
    chosen = assign_types(
        tensors,
        kind,
        facts,
        overrides,
        imatrix=with_importance is not None,
        with_importance=with_importance or (),
    )
    _require_importance(
        {name: present for name, _, present in tensors}, chosen, kind, with_importance
    )
    return chosen


def assign_types(
    tensors: TensorTable,
    kind: FileType,
    facts: ModelFacts,
    overrides: TypeOverrides = NO_OVERRIDES,
    *,
    imatrix: bool = False,
    with_importance: Collection[str] = (),
) -> dict[str, TypeChoice]:
    """Return the types of choose_types(), without the check that the imatrix has data for every
    type that needs it. `imatrix` says whether there is an imatrix.

    Tensors of layers that predict further tokens get PREDICTION_TYPE unless an override or the
    imatrix names them.
    """
    if overrides.mix is not None:
        return _types_of_mix(tensors, facts, overrides)
    parsed = _ParsedOverrides.parse(overrides)
    names = {name for name, _, _ in tensors}
    unmeasured = {
        name
        for name in names
        if is_in_prediction_layer(name, facts) and name not in with_importance
    }
    model = _RuleInputs(
        kind,
        facts,
        has_imatrix=imatrix,
        is_tied=HEAD_NAME not in names,
        value_count=sum(tensor_role(name) == "v" for name in names - unmeasured),
    )
    ordered = sorted(tensors, key=lambda tensor: tensor_order(tensor[0]))
    quantizable = [
        tensor
        for tensor in quantizable_tensors(ordered, facts)
        if not (overrides.keep_head and tensor[0] == HEAD_NAME)
    ]
    decided = {
        name: _decide_by_override(name, present, kind, parsed) for name, _, present in quantizable
    }
    undecided = {name for name in decided if decided[name].type is None}
    by_rule = [tensor for tensor in quantizable if tensor[0] in undecided - unmeasured]
    positions = _find_positions(by_rule, model)
    chosen = {name: TypeChoice(present) for name, _, present in ordered}
    for name, shape, _ in quantizable:
        wanted = decided[name].type or (
            PREDICTION_TYPE
            if name in unmeasured
            else _rule_type(name, shape[0], positions[name], model, parsed.head)
        )
        chosen[name] = fit_row_length(wanted, shape[0])
    _require_used(parsed, decided, model)
    return chosen


def quantizable_tensors(tensors: TensorTable, facts: ModelFacts) -> TensorTable:
    """Return the tensors that may be quantized. A mix must name exactly these tensors."""
    return [
        (name, shape, present)
        for name, shape, present in tensors
        if is_quantizable(name, shape, facts) and present not in ggml.INTEGER_TYPES
    ]


def _types_of_mix(
    tensors: TensorTable, facts: ModelFacts, overrides: TypeOverrides
) -> dict[str, TypeChoice]:
    """Return each tensor's type in the mix. Raises UserError if the mix does not name exactly the
    quantizable tensors, or if a type does not fit their rows.
    """
    if overrides != TypeOverrides(mix=overrides.mix):
        raise UserError(
            "a plan decides every tensor's type",
            hint="leave out --tensor-type, --pure and the like",
        )
    mix = dict(overrides.mix or {})
    chosen, problems = {name: TypeChoice(present) for name, _, present in tensors}, []
    for name, shape, _ in quantizable_tensors(tensors, facts):
        kind = mix.pop(name, None)
        if kind is None:
            problems.append(f"it has no type for {name}")
        elif shape[0] % ggml.block_size(kind).values:
            problems.append(f"rows of {shape[0]} are no multiple of the blocks of {kind}: {name}")
        else:
            chosen[name] = TypeChoice(kind)
    problems += [f"this model has no quantizable tensor {name}" for name in mix]
    if problems:
        raise UserError(
            f"the plan is not for this model: {list_first(problems, 3)}",
            hint="make one from this source with --plan-out FILE",
        )
    return chosen


def fit_row_length(wanted: str, columns: int) -> TypeChoice:
    """Return the wanted type if `columns`, the row length, is a multiple of its block size.
    Otherwise return its replacement, or F16 if that does not fit either. Raises UserError if a type
    with large blocks has no replacement.
    """
    if columns % ggml.block_size(wanted).values == 0:
        return TypeChoice(wanted)
    replacement = FALLBACK_TYPES.get(wanted, wanted)
    if replacement == wanted and ggml.block_size(wanted).values > 32:
        raise UserError(
            f"rows of {columns} are no multiple of the blocks of {wanted},"
            " and no other type can replace it",
            hint="choose another type, or --tensor-type for these tensors",
        )
    return TypeChoice(
        replacement if columns % ggml.block_size(replacement).values == 0 else "F16", wanted
    )


def _require_importance(
    present: dict[str, str],
    chosen: dict[str, TypeChoice],
    kind: FileType,
    with_importance: Collection[str] | None,
) -> None:
    """Raise UserError if tensors without data in the imatrix get types of very few bits, whose
    rounding would be noise.
    """
    noisy = []
    for name, choice in chosen.items():
        is_outside_blocks = tensor_role(name) in ("head", "embedding")
        would_be_noise = (
            choice.type
            in (TYPES_ABORTING_WITHOUT_IMATRIX if is_outside_blocks else kind.types_needing_imatrix)
            and choice.type != present[name]
        )
        if would_be_noise and (with_importance is None or name not in with_importance):
            noisy.append(name)
    if not noisy:
        return
    names = ", ".join(f"{name} ({chosen[name].type})" for name in noisy[:3])
    names += " …" if len(noisy) > 3 else ""
    if with_importance is None:
        raise UserError(
            f"{kind.name} needs an importance matrix:"
            f" without one {len(noisy)} tensors would be noise: {names}",
            hint="add --imatrix FILE, as llama-imatrix makes it, or choose a larger type",
        )
    raise UserError(
        f"tensors without data in the imatrix, which would be noise without it: {names}",
        hint="give these another type with --tensor-type, or calibrate on more text",
    )


@dataclass(frozen=True, slots=True)
class _ParsedOverrides:
    """The user's overrides with their texts parsed: compiled patterns and valid type names."""

    patterns: tuple[tuple[re.Pattern[str], str], ...]
    head: str | None
    embedding: str | None
    keep_head: bool
    pure: bool

    @classmethod
    def parse(cls, overrides: TypeOverrides) -> "_ParsedOverrides":
        return cls(
            parse_overrides(overrides.tensor_types),
            parse_tensor_type(overrides.head_type) if overrides.head_type else None,
            parse_tensor_type(overrides.embedding_type) if overrides.embedding_type else None,
            overrides.keep_head,
            overrides.pure,
        )

    def find_pattern_type(self, name: str) -> str | None:
        """Return the type of the first pattern that is found in a tensor's name, or None."""
        return next((new for pattern, new in self.patterns if pattern.search(name)), None)


@dataclass(frozen=True, slots=True)
class _RuleInputs:
    """The inputs of a file type's rules that are equal for all tensors of a model.

    `value_count` is the number of tensors with the role v. `is_tied` means that the embedding is
    also the head.
    """

    kind: FileType
    facts: ModelFacts
    has_imatrix: bool
    is_tied: bool
    value_count: int


@dataclass(frozen=True, slots=True)
class _OverrideDecision:
    """What the overrides decide about a tensor: `type` is its type, or None if the rules of the
    file type decide.

    `override` is "head" or "embedding" if head_type or embedding_type decided. `is_matchable` means
    that a REGEX=TYPE setting could decide this tensor's type.
    """

    type: str | None
    override: str = ""
    is_matchable: bool = False


def _decide_by_override(
    name: str, present: str, kind: FileType, overrides: _ParsedOverrides
) -> _OverrideDecision:
    """Return what the overrides decide about a tensor with the type `present`."""
    role, pattern_type = tensor_role(name), overrides.find_pattern_type(name)
    # As in llama.cpp: the per-layer embedding gets the embedding's type unless a pattern names it.
    is_named = pattern_type is not None and name != EMBEDDING_NAMES[0]
    if role == "embedding" and overrides.embedding and not is_named:
        return _OverrideDecision(overrides.embedding, "embedding")
    if role == "head" and overrides.head:
        return _OverrideDecision(overrides.head, "head")
    if present in TRAINED_TYPES:
        return _OverrideDecision(pattern_type or present, is_matchable=True)
    if not ggml.is_quantized(kind.default_type):
        return _OverrideDecision(kind.default_type)
    default = kind.default_type if overrides.pure else None
    return _OverrideDecision(pattern_type or default, is_matchable=True)


def _find_positions(tensors: TensorTable, model: _RuleInputs) -> dict[str, TensorPosition]:
    """Return the position of each tensor whose type a rule decides, by name. As in llama.cpp,
    tensors whose type an override decides are not counted.
    """
    facts, counts = model.facts, dict.fromkeys(COUNTED_ROLES, 0)
    positions = {}
    for name, shape, _ in tensors:
        role = tensor_role(name)
        index = counts.get(role, 0)
        if role in counts:
            counts[role] += 1
        if role in FEED_FORWARD_ROLES and facts.experts > 1 and not model.kind.is_low_bit:
            index = _layer_of(name, facts)
        is_stacked = len(shape) > 2 and shape[2] > 1
        # its attention has stacked matrices that do not belong to experts
        if facts.architecture == "bailingmoe3":
            is_stacked &= role in FEED_FORWARD_ROLES
        count = model.value_count if role == "v" else facts.layers - facts.prediction_layers
        positions[name] = TensorPosition(index, count, facts, model.has_imatrix, is_stacked)
    return positions


def _layer_of(name: str, facts: ModelFacts) -> int:
    """Return a tensor's layer. Raises UserError if the model has no such layer."""
    layer = tensor_order(name)[0]
    if not 0 <= layer < facts.layers:
        raise UserError(
            f"tensor {name} is in none of the model's {facts.layers} layers",
            hint="the file's block_count is wrong: download it again",
        )
    return layer


def _rule_type(
    name: str, columns: int, position: TensorPosition, model: _RuleInputs, head_type: str | None
) -> str:
    """Return the type that the rules of the file type give a tensor. `head_type` is the user's type
    for the head, None if there is none; an embedding that is also the head gets it, too.
    """
    role, kind, facts = tensor_role(name), model.kind, model.facts
    if facts.architecture == "glm5-next" and any(part in name for part in Q8_PARTS_GLM5):
        return "Q8_0"
    if role == "head" or (role == "embedding" and model.is_tied):
        is_odd = columns % ggml.block_size(kind.default_type).values != 0
        by_rule = "Q8_0" if facts.architecture == "falcon" or is_odd else kind.head_type
        return head_type or by_rule
    rule = kind.rules.get("every") or kind.rules.get(role)
    chosen = (rule(position) if callable(rule) else rule) or kind.default_type
    if kind.is_low_bit or "every" in kind.rules:
        return chosen
    if facts.experts == 8 and role in ("v", "k"):
        return "Q8_0"
    return "Q5_K" if role == "v" and facts.is_70b and chosen in ("Q3_K", "Q4_K") else chosen


def _require_used(
    overrides: _ParsedOverrides, decided: Mapping[str, _OverrideDecision], model: _RuleInputs
) -> None:
    """Raise UserError if an override has no effect on any tensor."""
    matchable = [name for name, decision in decided.items() if decision.is_matchable]
    for pattern, _ in overrides.patterns:
        if not any(map(pattern.search, matchable)):
            names = ", ".join(matchable[:3]) or "none, the type is a float"
            raise UserError(
                f"{pattern.pattern!r} matches no tensor that {model.kind.name} would quantize",
                hint=f"such names are: {names}",
            )
    if overrides.keep_head and overrides.head:
        raise UserError(
            "output.weight cannot both keep its type and get another one",
            hint="use either --leave-output-tensor or --output-tensor-type",
        )
    used = {decision.override for decision in decided.values()}
    decides_tied_head = model.is_tied and any(
        decision.type is None and tensor_role(name) == "embedding"
        for name, decision in decided.items()
    )
    ties = "this model ties its output to the embedding"
    for flag, has_effect, reason in (
        (
            "--output-tensor-type",
            not overrides.head or "head" in used or decides_tied_head,
            ties,
        ),
        (
            "--token-embedding-type",
            not overrides.embedding or "embedding" in used,
            "it has no token_embd.weight",
        ),
        ("--leave-output-tensor", not overrides.keep_head or not model.is_tied, ties),
    ):
        if not has_effect:
            raise UserError(
                f"{flag} has no effect: {reason}",
                hint="leave it out, or use --token-embedding-type",
            )
