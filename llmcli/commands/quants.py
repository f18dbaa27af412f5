"""What a model would take in every type of the list: the file, the run, and whether it fits.

Each type is rehearsed with a stand-in (standing.py) that has no vocabulary, whose reading is nearly
all of the time of a rehearsal; its size alone is kept, since a row of logits has as many numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.units import size

if TYPE_CHECKING:
    from llmcli.hardware.plan import Planner, Receipt
    from llmcli.runtime.binding.context import ContextOptions
    from llmcli.ui import UI
    from quant.container import Header
    from quant.file_types import FileType
    from quant.planning import Plan
    from quant.writer import Layout

WORDS = "tokenizer."
TERNARY = ("TQ1_0", "TQ2_0", "Q2_0", "Q1_0")


@dataclass(frozen=True, slots=True)
class Quant:
    """One type. `total`: bytes of all that llama.cpp maps and allocates, `process`: of the whole
    process; None: not known. `fits`: as the receipt's. `imatrix`: it cannot be made without one.
    `here`: the file is of this type.
    """

    type: str
    file: int
    bits: float
    total: int | None
    process: int | None
    fits: bool | None
    imatrix: bool
    here: bool

    @property
    def few(self) -> bool:
        """Whether only models that were trained in such values survive it."""
        return self.type in TERNARY


def quants(
    header: "Header",
    options: "ContextOptions",
    gpu_layers: int,
    told: "Receipt",
    folder: Path,
    there: bool,
    draft: "Planner | None" = None,
) -> list[Quant]:
    """Every type that this model's rows allow, the largest file first.

    `told` is the receipt of the file itself; not `there`: it is a stand-in for one that is still to
    be made.
    """
    from quant import quantize as road
    from quant.errors import Refusal

    source, found = road.open_gguf(header.path), []
    seen: dict[tuple[str, ...], Receipt] = {}
    for name, kind in kinds().items():
        if name == "MXFP4_MOE" and not source.facts.experts:
            continue  # for experts' matrices alone
        try:
            plan = road.sketch(source, name)
            stored = tuple(step.type for step in plan.steps)
            if stored not in seen:  # rows that fill few blocks make several types alike
                seen[stored] = _receipt(_hollow(plan, header), folder, options, gpu_layers, draft)
            receipt = seen[stored]
        except Refusal:  # rows that do not fill its blocks
            continue
        total = receipt.sum("total")
        process = None if total is None or told.overhead is None else told.overhead + total
        here = there and name == header.file_type
        file = sum(one.stat().st_size for one in header.files) if here else plan.nbytes
        found.append(
            Quant(
                name,
                file,
                plan.bits_per_weight,
                total,
                process,
                receipt.fits,
                kind.needs_imatrix,
                here,
            )
        )
    return sorted(found, key=lambda one: -one.file)


def kinds() -> "Mapping[str, FileType]":
    """The list."""
    from quant.file_types import FILE_TYPES

    return FILE_TYPES


def _receipt(
    layout: "Layout",
    folder: Path,
    options: "ContextOptions",
    gpu_layers: int,
    draft: "Planner | None",
) -> "Receipt":
    from llmcli.hardware.plan import planner
    from quant import container

    path = folder / "sketch.gguf"
    with path.open("wb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.nbytes)
    with planner(container.read(path), options, gpu_layers, draft) as held:
        return held.receipt()


def _hollow(plan: "Plan", header: "Header") -> "Layout":
    """The header of a plan, its vocabulary but for the number of its words left out."""
    from quant import writer
    from quant.container import Array

    source = plan.source
    words = header.metadata.get("tokenizer.ggml.tokens")
    count = words.count if isinstance(words, Array) else 0
    entries = {key: blob for key, blob in source.entries if not key.startswith(WORDS)}
    entries |= {
        "tokenizer.ggml.model": writer.entry("string", "no_vocab"),
        f"{header.architecture}.vocab_size": writer.entry("uint32", count),
        "general.file_type": writer.entry("uint32", plan.file_type.number),
    }
    tensors = [(step.weight.name, step.weight.shape, step.type) for step in plan.steps]
    return writer.layout([*entries.items()], tensors, source.alignment)


def documents(found: Iterable[Quant], *, quantized: bool) -> list[dict[str, Any]]:
    """The contract's `quants`; `quantized`: the source is, and another type would round it again."""
    return [
        {
            "type": one.type,
            "file_bytes": one.file,
            "bits_per_weight": round(one.bits, 4),
            "total_bytes": one.total,
            "process_bytes": one.process,
            "fits": one.fits,
            "needs_imatrix": one.imatrix,
            "present": one.here,
            "requantizes": quantized and not one.here,
        }
        for one in found
    ]


def tell(found: list[Quant], ui: "UI", *, quantized: bool) -> None:
    """The table for people."""
    words = {True: "yes", False: "no", None: "unknown"}
    rows = [
        (
            one.type,
            size(one.file),
            f"{one.bits:.2f}",
            "unknown" if one.total is None else size(one.total),
            words[one.fits],
            ", ".join(
                ["this file"] * one.here
                + ["needs an imatrix"] * one.imatrix
                + ["noise unless trained so"] * one.few
            ),
        )
        for one in found
    ]
    ui.text()
    columns = ("as type", "file", "bits/weight", "llama.cpp in all", "fits", "")
    ui.table(columns, rows, right=columns[1:5])
    if quantized:
        ui.text(
            "the file is quantized already: another type rounds it again; a float checkpoint gives a better one"
        )
