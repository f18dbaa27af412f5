"""Mixes of types for llama-quantize that fill a size, as an expert would write them by hand.

A mix begins with one of llama-quantize's own file types that is smaller than the wanted size. Then
tensors get the next larger type, in the order in which published mixes spend bytes: attention's
values and outputs, the feed-forward's outputs of the first and last eighth of the blocks, keys and
queries, and the rest; again and again until no further one fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quant.calibration.imatrix import load_imatrix
from quant.native import ggml
from quant.quantize.plan import Plan, plan_quantization
from quant.quantize.write import open_gguf
from quant.recipes import tensor_types
from quant.recipes.tensor_types import TypeOverrides

# A tensor moves from one type to the next; a type that is not here to the first larger one.
LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
LEGACY_LADDER = ("Q4_0", "Q5_0", "Q5_1", "Q8_0")  # for rows that fill no superblock
IQ_TYPES = (
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ2_M",
    "IQ3_XXS",
    "IQ3_XS",
    "IQ3_S",
    "IQ3_M",
    "IQ4_XS",
    "IQ4_NL",
)
# The smaller file type from which a hand-made mix of a size begins.
SMALLER_TYPE = {
    "Q2_K": "Q2_K_S",
    "Q3_K_M": "Q3_K_S",
    "Q4_K_M": "Q4_K_S",
    "Q5_K_M": "Q5_K_S",
    "Q6_K": "Q5_K_M",
}
FIRST_ROLES, LATER_ROLES = ("v", "out"), ("k", "q")
EDGE_SHARE = 8  # an eighth of the blocks at either end


@dataclass(frozen=True)
class TypeMix:
    """A file type of llama-quantize, the type of each tensor that is quantized, and the bytes of all
    tensors. Types that equal the recipe's are given, too, because llama-quantize's recipe chooses
    others for the rest of the tensors if some are given.
    """

    file_type: str
    types: dict[str, str]
    nbytes: int

    @property
    def flags(self) -> list[str]:
        """The flags of llama-quantize, which takes names of tensors as regular expressions."""
        return [
            word
            for name, kind in self.types.items()
            for word in ("--tensor-type", f"^{name.replace('.', '[.]')}$={kind.lower()}")
        ]


def iq_mix(model: Path, imatrix: Path, nbytes: int, embedding: str | None = None) -> TypeMix:
    """Return the mix of at most `nbytes` bytes that begins with the largest IQ file type.
    `embedding`: the type of token_embd.weight, None for the recipe's.
    """
    plans = [file_plan(model, kind, imatrix, embedding) for kind in IQ_TYPES]
    fitting = [plan for plan in plans if plan.bytes_after <= nbytes]
    best = max(fitting or plans[:1], key=lambda plan: plan.bytes_after)
    return fill(best, nbytes)


def hand_made_mix(
    model: Path, imatrix: Path, file_type: str, nbytes: int, embedding: str | None = None
) -> TypeMix:
    """Return the mix of at most `nbytes` bytes that begins with the k-quant below `file_type`.
    `embedding` is as in iq_mix().
    """
    return fill(file_plan(model, SMALLER_TYPE[file_type], imatrix, embedding), nbytes)


def file_plan(model: Path, file_type: str, imatrix: Path, embedding: str | None = None) -> Plan:
    """Return the plan of llama-quantize's recipe, which ours equals."""
    overrides = TypeOverrides(embedding_type=embedding)
    return plan_quantization(open_gguf(model), file_type, overrides, load_imatrix(imatrix))


def fill(plan: Plan, nbytes: int) -> TypeMix:
    """Return the plan's types with larger ones as long as all tensors have at most `nbytes`."""
    types = {step.weight.name: step.type for step in plan.steps if step.method}
    weights = {step.weight.name: step.weight for step in plan.steps}
    used = plan.bytes_after
    while True:
        progress = False
        for name in spending_order(list(types)):
            weight = weights[name]
            larger = next_type(types[name], weight.columns)
            added = weight.rows * (
                ggml.row_bytes(larger, weight.columns) - ggml.row_bytes(types[name], weight.columns)
            )
            if added and used + added <= nbytes:
                types[name], used, progress = larger, used + added, True
        if not progress:
            return TypeMix(plan.file_type.name, types, used)


def spending_order(names: list[str]) -> Iterator[str]:
    """Yield the names of tensors of blocks in the order in which they get larger types."""
    ordered = sorted(names, key=tensor_types.tensor_order)
    blocks = 1 + max(tensor_types.tensor_order(name)[0] for name in names)
    edge = -(-blocks // EDGE_SHARE)

    def rank(name: str) -> int:
        block, role = tensor_types.tensor_order(name)[0], tensor_types.tensor_role(name)
        if role in FIRST_ROLES:
            return 0
        if role == "down" and not edge <= block < blocks - edge:
            return 1
        return 2 if role in LATER_ROLES else 3 if role == "down" else 4

    yield from sorted((name for name in ordered if name.startswith("blk.")), key=rank)


def next_type(kind: str, columns: int) -> str:
    """Return the type to which a tensor with rows of `columns` moves from `kind`, or `kind` if there
    is none.
    """
    ladder = LEGACY_LADDER if columns % ggml.block_size("Q4_K").values else LADDER
    bits = ggml.row_bytes(kind, columns)
    return next((larger for larger in ladder if ggml.row_bytes(larger, columns) > bits), kind)
