"""Alternatives to a planned run that would fit into memory: longer contexts, other cache types,
more sequences, GPU layers and other file types.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.commands.plan import quantized_sizes
from llmcli.commands.plan.quantized_sizes import QuantizedSize

if TYPE_CHECKING:
    from llmcli.planning.dry_runs.memory_plan import DraftMemory, MemoryPlan
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from llmcli.runtime.binding.placement.model_placement import ModelPlacement
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Other settings with which a run would fit into memory.

    - `weight_bytes`: bytes of the weights, by device and tensor type.
    - `max_contexts`: the longest context in tokens, by cache type; None: unknown.
    - `supported_types`: the cache types that the model supports.
    - `max_sequences`: how many sequences of `tokens_per_sequence` tokens fit; None: unknown.
    - `gpu_layers`: how many of the `n_layers` layers fit on the GPUs; None: there is no GPU.
    - `quants`: the sizes of the model in other file types.
    """

    weight_bytes: dict[str, dict[str, int]]
    max_contexts: dict[str, int | None]
    supported_types: tuple[str, ...]
    max_sequences: int | None
    tokens_per_sequence: int
    gpu_layers: int | None
    n_layers: int
    quants: list[QuantizedSize]


def find_alternatives(
    header: "ModelHeader",
    options: "ContextOptions",
    placement: "ModelPlacement",
    memory_plan: "MemoryPlan",
    file_exists: bool,
    draft: "DraftMemory | None" = None,
) -> Alternatives:
    """Return the other settings with which a run would fit into memory. Dry runs of llama.cpp
    determine the sizes.

    `memory_plan`: the plan of the requested run. `file_exists`: False if the model's file is not
    written yet.
    """
    from llmcli.planning.dry_runs.memory_plan import (
        PLANNED_CACHE_TYPES,
        largest_gpu_layers,
        open_memory_planner,
    )

    with open_memory_planner(header, options, placement, draft) as planner:
        types, sequences = planner.bytes_by_type, planner.largest_sequence_count()
        longest = {kind: planner.largest_context(kind) for kind in PLANNED_CACHE_TYPES}
        supported_types = tuple(
            kind for kind in PLANNED_CACHE_TYPES if planner.supports_cache_type(kind)
        )
    max_gpu_layers, layers = (
        largest_gpu_layers(header, options, placement, draft),
        (header.get_int("block_count") or 0) + 1,
    )
    with tempfile.TemporaryDirectory(prefix="llmcli-plan-") as folder:
        sizes = quantized_sizes.quantized_sizes(
            header, options, placement, memory_plan, Path(folder), file_exists, draft
        )
    tokens_per_sequence = -(-options.n_ctx // options.n_seq_max)
    return Alternatives(
        types,
        longest,
        supported_types,
        sequences,
        tokens_per_sequence,
        max_gpu_layers,
        layers,
        sizes,
    )


def build_fields(alternatives: Alternatives, is_quantized: bool) -> dict[str, Any]:
    """Return the fields of `plan --json` that describe the alternatives. `is_quantized`: whether
    the model's file is already quantized.
    """
    return {
        "max_ctx": alternatives.max_contexts,
        "max_parallel": alternatives.max_sequences,
        "gpu_layers": {"most": alternatives.gpu_layers, "layers": alternatives.n_layers},
        "quants": quantized_sizes.build_documents(alternatives.quants, is_quantized=is_quantized),
    }


def print_alternatives(
    alternatives: Alternatives,
    memory_plan: "MemoryPlan",
    options: "ContextOptions",
    trained_context: int,
    ui: "UI",
    *,
    is_quantized: bool,
) -> None:
    """Print the alternatives and the table of file types."""
    from llmcli.planning.dry_runs.memory_plan import MAX_CELLS
    from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES

    contexts = [
        f"{kind} {_format_count(alternatives.max_contexts[kind], MAX_CELLS)}"
        for kind in alternatives.supported_types
    ]
    ui.text()
    ui.text(
        f"longest context that fits: {', '.join(contexts)}"
        + (f" (trained on {trained_context:,})" if trained_context else "")
    )
    max_sequences = min(
        MAX_SEQUENCES,
        MAX_CELLS // alternatives.tokens_per_sequence if alternatives.tokens_per_sequence else 0,
    )
    ui.text(
        f"sequences of {alternatives.tokens_per_sequence:,} tokens that fit at once: "
        f"{_format_count(alternatives.max_sequences, max_sequences)}"
    )
    if alternatives.gpu_layers is not None:
        ui.text(
            f"layers that fit on the GPU: {alternatives.gpu_layers} of {alternatives.n_layers} (-ngl)"
        )
    if memory_plan.fits is False:
        ui.text(_suggest_settings(alternatives, options, trained_context))
    quantized_sizes.print_table(alternatives.quants, ui, is_quantized=is_quantized)


def _format_count(number: int | None, upper_limit: int) -> str:
    return (
        "unknown"
        if number is None
        else f"{number:,}" + (" or more" if number == upper_limit else "")
    )


def _suggest_settings(
    alternatives: Alternatives, options: "ContextOptions", trained_context: int
) -> str:
    """Return a line with settings that fit: the longest context with each cache type, and the
    largest file type.
    """
    options_that_fit = [
        f"-c {alternatives.max_contexts[kind]}"
        + ("" if options.type_k == options.type_v == kind else f" -ctk {kind} -ctv {kind}")
        for kind in alternatives.supported_types
        if alternatives.max_contexts[kind]
    ]
    smaller_type = next(
        (
            quantized_size.type
            for quantized_size in alternatives.quants
            if quantized_size.fits
            and not quantized_size.is_present
            and not quantized_size.needs_imatrix
        ),
        None,
    )
    options_that_fit += [f"--quant {smaller_type}"] if smaller_type else []
    longest = max((count or 0 for count in alternatives.max_contexts.values()), default=0)
    is_beyond = 0 < trained_context < longest
    remark = f" (the model was trained on {trained_context:,} tokens)" if is_beyond else ""
    return (
        f"these would fit: {' · '.join(options_that_fit)}{remark}"
        if options_that_fit
        else "no setting of this model fits this machine"
    )
