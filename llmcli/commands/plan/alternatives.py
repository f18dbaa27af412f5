"""Alternatives to a planned run that would fit: longer contexts, other cache types, more sequences,
GPU layers, other file types.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.commands.plan import quantized_sizes
from llmcli.commands.plan.quantized_sizes import Quant

if TYPE_CHECKING:
    from llmcli.planning.memory_plan import Planner, Receipt
    from llmcli.runtime.binding.context_options import ContextOptions
    from llmcli.ui import UI
    from quant.model_file.model_header import Header


@dataclass(frozen=True, slots=True)
class Others:
    """What would fit besides the planned run; None is unknown, or there is no GPU.

    `weight_bytes`: by device and type; `max_contexts`: by cache type; `supported_types`: the cache
    types that the model supports; `max_sequences`: of `tokens_per_sequence` tokens each;
    `gpu_layers`: layers that fit on the GPUs, of `n_layers`.
    """

    types: dict[str, dict[str, int]]
    longest: dict[str, int | None]
    taken: tuple[str, ...]
    sequences: int | None
    each: int
    gpu_layers: int | None
    layers: int
    quants: list[Quant]


def look(
    header: "Header",
    options: "ContextOptions",
    gpu_layers: int,
    told: "Receipt",
    there: bool,
    draft: "Planner | None" = None,
) -> Others:
    """Return what would fit besides the planned run.

    `memory_plan`: plan of that run; `file_exists`: False if its file is not written yet.
    """
    from llmcli.planning import memory_plan as planning

    with planning.planner(header, options, gpu_layers, draft) as planner:
        types, sequences = planner.types, planner.sequences()
        longest = {kind: planner.largest(kind) for kind in planning.KINDS}
        taken = tuple(kind for kind in planning.KINDS if planner.takes(kind))
    max_gpu_layers, layers = (
        planning.most_layers(header, options, draft),
        (header.number("block_count") or 0) + 1,
    )
    with tempfile.TemporaryDirectory(prefix="llmcli-plan-") as folder:
        sizes = quantized_sizes.quants(
            header, options, gpu_layers, told, Path(folder), there, draft
        )
    tokens_per_sequence = -(-options.n_ctx // options.n_seq_max)
    return Others(
        types, longest, taken, sequences, tokens_per_sequence, max_gpu_layers, layers, sizes
    )


def document(other: Others, quantized: bool) -> dict[str, Any]:
    """Return the fields of `plan --json`."""
    return {
        "max_ctx": other.longest,
        "max_parallel": other.sequences,
        "gpu_layers": {"most": other.gpu_layers, "layers": other.layers},
        "quants": quantized_sizes.documents(other.quants, quantized=quantized),
    }


def tell(
    other: Others,
    told: "Receipt",
    options: "ContextOptions",
    trained: int,
    ui: "UI",
    *,
    quantized: bool,
) -> None:
    """Print the alternatives and the table of file types."""
    from llmcli.planning.memory_plan import MOST_CELLS
    from llmcli.runtime.binding.context_options import MAX_SEQUENCES

    contexts = [f"{kind} {_format_count(other.longest[kind], MOST_CELLS)}" for kind in other.taken]
    ui.text()
    ui.text(
        f"longest context that fits: {', '.join(contexts)}"
        + (f" (trained on {trained:,})" if trained else "")
    )
    max_sequences = min(MAX_SEQUENCES, MOST_CELLS // other.each if other.each else 0)
    ui.text(
        f"sequences of {other.each:,} tokens that fit at once: "
        f"{_format_count(other.sequences, max_sequences)}"
    )
    if other.gpu_layers is not None:
        ui.text(f"layers that fit on the GPU: {other.gpu_layers} of {other.layers} (-ngl)")
    if told.fits is False:
        ui.text(_suggest_settings(other, options))
    quantized_sizes.tell(other.quants, ui, quantized=quantized)


def _format_count(number: int | None, most: int) -> str:
    return "unknown" if number is None else f"{number:,}" + (" or more" if number == most else "")


def _suggest_settings(other: Others, options: "ContextOptions") -> str:
    """Return the closest settings that fit, of the context or the weights."""
    options_that_fit = [
        f"-c {other.longest[kind]}"
        + ("" if options.type_k == options.type_v == kind else f" -ctk {kind} -ctv {kind}")
        for kind in other.taken
        if other.longest[kind]
    ]
    smaller_type = next(
        (
            quantized_size.type
            for quantized_size in other.quants
            if quantized_size.fits and not quantized_size.here and not quantized_size.imatrix
        ),
        None,
    )
    options_that_fit += [f"--quant {smaller_type}"] if smaller_type else []
    return (
        f"these would fit: {' · '.join(options_that_fit)}"
        if options_that_fit
        else "no setting of this model fits this machine"
    )
