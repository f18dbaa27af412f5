"""`llmcli plan`: parse, rehearse, print the receipt. What is in it is hardware/plan.py's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.grouped import grouped
from llmcli.commands.reporting import Charts, Report
from llmcli.commands.show import Json, Ref, start
from llmcli.commands.workers import Workers
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.commands.standing import Standing
    from llmcli.config import Config
    from llmcli.hardware.plan import Planner, Receipt
    from llmcli.runtime.binding.context import ContextOptions
    from llmcli.runtime.request import RunOptions
    from llmcli.ui import UI
    from quant.container import Header

Context = Annotated[
    int | None, typer.Option("-c", "--ctx-size", help="Tokens of context; default: as chat's.")
]
Batch = Annotated[int, typer.Option("-b", "--batch-size", help="Tokens of a logical batch.")]
Ubatch = Annotated[int, typer.Option("-ub", "--ubatch-size", help="Tokens of a physical batch.")]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", help="Threads; default: the physical cores.")
]
Layers = Annotated[
    str, typer.Option("-ngl", "--gpu-layers", help="Layers on the GPU: a number, all, auto.")
]
Flash = Annotated[str, typer.Option("-fa", "--flash-attn", help="Flash attention: on, off, auto.")]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]
Parallel = Annotated[int, typer.Option("-np", "--parallel", min=1, help="Sequences at once.")]
Unified = Annotated[
    bool,
    typer.Option(
        "--kv-unified/--no-kv-unified", "-kvu/-no-kvu", help="One pool of cells, or one a sequence."
    ),
]
Quant = Annotated[
    str | None, typer.Option("--quant", metavar="TYPE", help="As if quantized to this type.")
]
Draft = Annotated[
    str | None, typer.Option("-md", "--model-draft", metavar="REF", help="A draft model beside it.")
]
Measure = Annotated[bool, typer.Option("--measure", help="Load it, and tell the difference.")]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("plan")(grouped(plan))


def plan(
    ref: Ref,
    ctx_size: Context = None,
    batch_size: Batch = 2048,
    ubatch_size: Ubatch = 512,
    threads: Threads = None,
    gpu_layers: Layers = "auto",
    flash_attn: Flash = "auto",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    parallel: Parallel = 1,
    unified: Unified = True,
    quant: Quant = None,
    model_draft: Draft = None,
    measure: Measure = False,
    report_file: Report = None,
    chart: Charts = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
    *,
    workers: Workers,
) -> None:
    """Tell every byte of a run before it is allocated, and whether it fits."""
    from llmcli.commands import others, plan_page, receipt, reporting
    from llmcli.commands.standing import standing
    from llmcli.runtime.request import RunOptions
    from quant import container

    config, ui = start(json, offline)
    workers.join(ui)
    reporting.check(report_file)
    if measure and model_draft:
        raise UsageError("--measure weighs one model", hint="leave out --measure or -md")
    options = RunOptions(
        ctx_size or None,
        threads,
        None,
        batch_size,
        ubatch_size,
        gpu_layers,
        flash_attn,
        type_k,
        type_v,
    )
    with standing(ref, quant, config, ui) as subject:
        header = container.read(subject.path)
        container.check(header)
        wanted, layers, reading = _decided(header, options, parallel, unified, config, ui)
        with _drafting(model_draft, header, wanted, layers, config, ui) as (wanted, draft):
            told, found = _receipts(subject, header, wanted, layers, draft, measure)
            apart = receipt.apart(header, reading, layers) if reading else 0
            scored = receipt.sum_of(
                receipt.scored(header, one, layers, parallel) for one in (wanted, reading) if one
            )
            other = others.look(header, wanted, layers, told, not subject.sketched, draft)
    title = receipt.title(subject.name, header, wanted, told)
    if json:
        more = {**others.document(other, subject.quantized), "reading_bytes": apart}
        more |= {"scored_bytes": scored, "outside_bytes": receipt.outside(told, parallel)}
        actual = {"actual": {**document(found), **dict.fromkeys(more)}} if found else {}
        ui.result({**document(told, other.types), **more, **actual})
    else:
        ui.text(title + (f" · {subject.lacks}" if subject.lacks else ""))
        receipt.table(told, found, ui)
        receipt.beside(told, parallel, apart, scored, ui)
        receipt.weights(other.types, ui)
        receipt.layers(told.cache, ui)
        others.tell(other, told, wanted, header.context_length, ui, quantized=subject.quantized)
    drawn = plan_page.charts(told, found)
    reporting.show(
        lambda: plan_page.made(title, told, found, other), lambda: drawn, (report_file, chart), ui
    )


def _receipts(
    subject: "Standing",
    header: "Header",
    wanted: "ContextOptions",
    layers: int,
    draft: "Planner | None",
    measure: bool,
) -> "tuple[Receipt, Receipt | None]":
    """What is planned, and what it really takes; before anything else is rehearsed, which leaves
    the process larger.
    """
    from llmcli.hardware import plan as planning

    if measure and subject.lacks:
        raise UserError(
            f"{subject.name} cannot be measured: {subject.lacks}", hint="leave out --measure"
        )
    with planning.planner(header, wanted, layers, draft) as planner:
        told = planner.receipt()
    if measure and told.fits is False:
        raise UserError(
            f"{subject.name} does not fit and was not loaded",
            hint="leave out --measure to see what it would take",
        )
    return told, planning.measure(header, wanted, layers) if measure else None


@contextmanager
def _drafting(
    ref: str | None,
    header: "Header",
    wanted: "ContextOptions",
    layers: int,
    config: "Config",
    ui: "UI",
) -> "Iterator[tuple[ContextOptions, Planner | None]]":
    """The context as it is with a draft model, and that rehearsed."""
    from llmcli.commands.standing import standing
    from llmcli.hardware.plan import planner
    from llmcli.runtime.drafting.curve import MOST
    from llmcli.runtime.drafting.vocabulary import refuse_other
    from llmcli.runtime.drafting.wish import draft_options
    from quant import container

    if ref is None:
        yield wanted, None
        return
    with standing(ref, None, config, ui) as subject:
        other = container.read(subject.path)
        container.check(other)
        refuse_other(header, other)
        wanted = replace(wanted, n_outputs=MOST)
        with planner(other, draft_options(wanted), -1 if layers else 0) as held:
            yield wanted, held


def _decided(
    header: "Header", options: "RunOptions", slots: int, unified: bool, config: "Config", ui: "UI"
) -> "tuple[ContextOptions, int, ContextOptions | None]":
    """What chat and serve would make of these options, and a wish that they would refuse as it is:
    the context, the layers on a GPU, and the context in which serve would read prompts apart.
    """
    from llmcli.hardware import fit
    from llmcli.runtime import kv, reader
    from llmcli.runtime.drafting.wish import NO_DRAFTING
    from llmcli.runtime.runner import context_options

    fit.check(options)
    kv.check(header.metadata, options.cache_type_k, options.cache_type_v)
    filled, layers = fit.decide(header, replace(options, ctx_size=None), lambda text: None, slots)
    size = options.ctx_size or filled.ctx_size
    assert size
    if header.context_length and size > header.context_length * slots:
        ui.warn(
            f"a context of {size} is longer than the {header.context_length} tokens this model was trained on"
        )
    filled = replace(filled, ctx_size=size)
    if unified or slots == 1:
        filled = fit.attention(header, filled, layers, config, slots, slots)
    wanted = replace(context_options(filled, slots, NO_DRAFTING, layers), unified=unified)
    return wanted, layers, reader.reading_options(wanted, filled) if filled.reading else None


def document(receipt: "Receipt", types: dict[str, dict[str, int]] | None = None) -> dict[str, Any]:
    """The contract's `plan --json`; null is a figure that this machine cannot tell."""
    cache, first = receipt.cache, receipt.shares[0]
    layers = [
        {
            "layer": layer.layer,
            "cells": layer.cells,
            "k_bytes": layer.k_bytes,
            "v_bytes": layer.v_bytes,
        }
        for layer in (cache.layers if cache else ())
    ]
    return {
        "weights_bytes": receipt.sum("weights"),
        "kv": {
            "bytes_per_token": cache.bytes_per_token if cache else None,
            "cells": receipt.n_ctx,
            "bytes": receipt.sum("kv"),
            "layers": layers if cache else None,
        },
        "compute_bytes": receipt.sum("compute"),
        "output_bytes": receipt.sum("output"),
        "repacked_bytes": receipt.sum("repacked"),
        "droppable_bytes": receipt.sum("droppable"),
        "overhead_bytes": receipt.overhead,
        "process_bytes": receipt.process,
        "total_bytes": receipt.sum("total"),
        "available_bytes": first.available,
        "fits": receipt.fits,
        "runs": receipt.runs,
        "draft_bytes": receipt.draft,
        "devices": [
            {
                "name": share.device,
                "weights_bytes": share.weights,
                "repacked_bytes": share.repacked,
                "kv_bytes": share.kv,
                "compute_bytes": share.compute,
                "output_bytes": share.output,
                "total_bytes": share.total,
                "available_bytes": share.available,
                "fits": share.fits,
                "types": types.get(share.device) if types else None,
            }
            for share in receipt.shares
        ],
    }
