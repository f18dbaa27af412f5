"""What else would fit: longer contexts, other cache types, more sequences, layers on a GPU, other
quantizations.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.commands import quants
from llmcli.commands.quants import Quant

if TYPE_CHECKING:
    from llmcli.hardware.plan import Planner, Receipt
    from llmcli.runtime.binding.context import ContextOptions
    from llmcli.ui import UI
    from quant.container import Header


@dataclass(frozen=True, slots=True)
class Others:
    """`types`: for each device its weights' bytes by type. `longest`: the longest context of each
    cache type, those that this model takes in `taken`. `sequences` that would fit at once, of
    `each` tokens; `gpu_layers` of `layers` that the GPUs hold. None: not known, or no GPU.
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
    """Rehearse all of it; `told` is the receipt of what is wanted, `there`: of a file that is not
    to be made yet.
    """
    from llmcli.hardware import plan as planning

    with planning.planner(header, options, gpu_layers, draft) as planner:
        types, sequences = planner.types, planner.sequences()
        longest = {kind: planner.largest(kind) for kind in planning.KINDS}
        taken = tuple(kind for kind in planning.KINDS if planner.takes(kind))
    most, layers = (
        planning.most_layers(header, options, draft),
        (header.number("block_count") or 0) + 1,
    )
    with tempfile.TemporaryDirectory(prefix="llmcli-plan-") as folder:
        found = quants.quants(header, options, gpu_layers, told, Path(folder), there, draft)
    each = -(-options.n_ctx // options.n_seq_max)
    return Others(types, longest, taken, sequences, each, most, layers, found)


def document(other: Others, quantized: bool) -> dict[str, Any]:
    """The contract's keys of it."""
    return {
        "max_ctx": other.longest,
        "max_parallel": other.sequences,
        "gpu_layers": {"most": other.gpu_layers, "layers": other.layers},
        "quants": quants.documents(other.quants, quantized=quantized),
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
    """Lines and the table of types for people."""
    from llmcli.hardware.plan import MOST_CELLS
    from llmcli.runtime.binding.context import MAX_SEQUENCES

    words = [f"{kind} {_count(other.longest[kind], MOST_CELLS)}" for kind in other.taken]
    ui.text()
    ui.text(
        f"longest context that fits: {', '.join(words)}"
        + (f" (trained on {trained:,})" if trained else "")
    )
    most = min(MAX_SEQUENCES, MOST_CELLS // other.each if other.each else 0)
    ui.text(f"sequences at once, {other.each:,} tokens each: {_count(other.sequences, most)}")
    if other.gpu_layers is not None:
        ui.text(f"layers that the GPU holds: {other.gpu_layers} of {other.layers} (-ngl)")
    if told.fits is False:
        ui.text(_instead(other, options))
    quants.tell(other.quants, ui, quantized=quantized)


def _count(number: int | None, most: int) -> str:
    return "unknown" if number is None else f"{number:,}" + (" or more" if number == most else "")


def _instead(other: Others, options: "ContextOptions") -> str:
    """The nearest settings that fit, of the context or of the weights."""
    ways = [
        f"-c {other.longest[kind]}"
        + ("" if options.type_k == options.type_v == kind else f" -ctk {kind} -ctv {kind}")
        for kind in other.taken
        if other.longest[kind]
    ]
    smaller = next(
        (one.type for one in other.quants if one.fits and not one.here and not one.imatrix), None
    )
    ways += [f"--quant {smaller}"] if smaller else []
    return f"would fit: {' · '.join(ways)}" if ways else "nothing of this model fits this machine"
