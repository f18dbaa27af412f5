"""Sizes of a model in every file type: the file, the memory of a run, and whether the run fits.

llama.cpp plans each type with a temporary file that has a header but no weights. The file also has
no vocabulary, because reading it would take most of the time. It only states the number of tokens,
which determines the size of the logits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.units import format_size

if TYPE_CHECKING:
    from llmcli.planning.dry_runs.memory_plan import DraftMemory, MemoryPlan
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from llmcli.runtime.binding.placement.model_placement import ModelPlacement
    from llmcli.ui import UI
    from quant.gguf.layout import FileLayout
    from quant.model_file.model_header import ModelHeader
    from quant.quantize.plan import Plan
    from quant.recipes.file_types import FileType

TOKENIZER_PREFIX = "tokenizer."
TERNARY_TYPES = ("TQ1_0", "TQ2_0", "Q2_0", "Q1_0")


@dataclass(frozen=True, slots=True)
class QuantizedSize:
    """The sizes of a model in one file type.

    - `total_bytes`: the bytes that llama.cpp maps and allocates; None: unknown.
    - `process_bytes`: the memory of the whole process; None: unknown.
    - `fits`: whether the run fits into memory; None: unknown.
    - `needs_imatrix`: whether the type needs an importance matrix.
    - `is_present`: whether the model's file already has this type.
    """

    type: str
    file_bytes: int
    bits_per_weight: float
    total_bytes: int | None
    process_bytes: int | None
    fits: bool | None
    needs_imatrix: bool
    is_present: bool

    @property
    def needs_native_training(self) -> bool:
        """Whether the type is useful only for models that were trained with ternary weights."""
        return self.type in TERNARY_TYPES


def quantized_sizes(
    header: "ModelHeader",
    options: "ContextOptions",
    placement: "ModelPlacement",
    memory_plan: "MemoryPlan",
    folder: Path,
    file_exists: bool,
    draft: "DraftMemory | None" = None,
) -> list[QuantizedSize]:
    """Return the sizes of the model in every file type that its row lengths allow, the largest file
    first.

    `memory_plan`: the plan of the model's own file. `file_exists`: False if that file is not
    written yet. `folder`: a folder for temporary files.
    """
    from quant.errors import UserError
    from quant.quantize import write
    from quant.quantize.plan import plan_sizes

    source, sizes = write.open_gguf(header.path), []
    plans_by_types: dict[tuple[str, ...], MemoryPlan] = {}
    for name, kind in file_types().items():
        if name == "MXFP4_MOE" and not source.facts.experts:
            continue  # this type is only for expert matrices
        try:
            plan = plan_sizes(source, name)
            tensor_types = tuple(step.type for step in plan.steps)
            if tensor_types not in plans_by_types:  # several types may be identical for this model
                plans_by_types[tensor_types] = _plan_type(
                    _header_without_vocabulary(plan, header), folder, options, placement, draft
                )
            type_plan = plans_by_types[tensor_types]
        except UserError:  # the rows do not fill the type's blocks
            continue
        total = type_plan.sums.total
        process = (
            None if total is None or memory_plan.overhead is None else memory_plan.overhead + total
        )
        is_current_type = file_exists and name == header.file_type
        file_bytes = (
            sum(shard.stat().st_size for shard in header.files) if is_current_type else plan.nbytes
        )
        sizes.append(
            QuantizedSize(
                name,
                file_bytes,
                plan.bits_per_weight,
                total,
                process,
                type_plan.fits,
                kind.needs_imatrix,
                is_current_type,
            )
        )
    return sorted(sizes, key=lambda size: -size.file_bytes)


def file_types() -> "Mapping[str, FileType]":
    """Return quant's file types by name."""
    from quant.recipes.file_types import FILE_TYPES

    return FILE_TYPES


def _plan_type(
    layout: "FileLayout",
    folder: Path,
    options: "ContextOptions",
    placement: "ModelPlacement",
    draft: "DraftMemory | None",
) -> "MemoryPlan":
    from llmcli.planning.dry_runs.memory_plan import open_memory_planner
    from quant.model_file import read_header

    path = folder / "sketch.gguf"
    with path.open("wb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.nbytes)
    with open_memory_planner(
        read_header.read_header(path), options, placement, draft
    ) as open_planner:
        return open_planner.memory_plan()


def _header_without_vocabulary(plan: "Plan", header: "ModelHeader") -> "FileLayout":
    """Return the GGUF header of a quantization plan, without the vocabulary but with the number of
    its tokens.
    """
    from quant.gguf.header import GgufArray
    from quant.gguf.layout import encode_entry, lay_out_file

    source = plan.source
    token_array = header.metadata.get("tokenizer.ggml.tokens")
    n_tokens = token_array.count if isinstance(token_array, GgufArray) else 0
    entries = {key: blob for key, blob in source.entries if not key.startswith(TOKENIZER_PREFIX)}
    entries |= {
        "tokenizer.ggml.model": encode_entry("string", "no_vocab"),
        f"{header.architecture}.vocab_size": encode_entry("uint32", n_tokens),
        "general.file_type": encode_entry("uint32", plan.file_type.number),
    }
    tensors = [(step.weight.name, step.weight.shape, step.type) for step in plan.steps]
    return lay_out_file([*entries.items()], tensors, source.alignment)


def build_documents(sizes: Iterable[QuantizedSize], *, is_quantized: bool) -> list[dict[str, Any]]:
    """Return the field `quants` of `plan --json`. `is_quantized`: whether the model's file is
    already quantized, so that any other type would quantize it again.
    """
    return [
        {
            "type": quantized_size.type,
            "file_bytes": quantized_size.file_bytes,
            "bits_per_weight": round(quantized_size.bits_per_weight, 4),
            "total_bytes": quantized_size.total_bytes,
            "process_bytes": quantized_size.process_bytes,
            "fits": quantized_size.fits,
            "needs_imatrix": quantized_size.needs_imatrix,
            "present": quantized_size.is_present,
            "requantizes": is_quantized and not quantized_size.is_present,
        }
        for quantized_size in sizes
    ]


def print_table(sizes: list[QuantizedSize], ui: "UI", *, is_quantized: bool) -> None:
    """Print the table of file types."""
    fits_words = {True: "yes", False: "no", None: "unknown"}
    rows = [
        (
            quantized_size.type,
            format_size(quantized_size.file_bytes),
            f"{quantized_size.bits_per_weight:.2f}",
            "unknown"
            if quantized_size.total_bytes is None
            else format_size(quantized_size.total_bytes),
            fits_words[quantized_size.fits],
            ", ".join(
                ["this file"] * quantized_size.is_present
                + ["needs an imatrix"] * quantized_size.needs_imatrix
                + ["noise unless trained for it"] * quantized_size.needs_native_training
            ),
        )
        for quantized_size in sizes
    ]
    ui.text()
    columns = ("as type", "file", "bits/weight", "llama.cpp total", "fits", "")
    ui.table(columns, rows, right=columns[1:5])
    if is_quantized:
        ui.text(
            "the file is already quantized: another type adds its error to that; "
            "a float checkpoint gives a better file"
        )
