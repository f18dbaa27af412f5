"""`llmcli plan`: predicts the memory of a run without loading the model, and prints it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import (
    Batch,
    Context,
    Draft,
    DraftMethod,
    Flash,
    Json,
    Layers,
    Measure,
    Parallel,
    Quant,
    Ref,
    Threads,
    Trust,
    TypeK,
    TypeV,
    Ubatch,
    Unified,
)
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.report import ReportOptions, show_report
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.model_loader.header_only import PlannedFile
    from llmcli.planning.dry_runs.memory_plan import MemoryPlan, Planner
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from llmcli.runtime.binding.placement.model_placement import ModelPlacement
    from llmcli.runtime.draft_settings import DraftSettings
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("plan")(with_option_groups(plan))


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
    draft: DraftMethod = "off",
    model_draft: Draft = None,
    measure: Measure = False,
    *,
    reporting: ReportOptions,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    placement_flags: PlacementGroup,
) -> None:
    """Print the memory that a run takes before it is allocated.

    The plan lists the bytes of each buffer, and whether the run fits into memory.
    """
    from llmcli.commands.plan import devices, page, receipt
    from llmcli.commands.plan.alternatives import (
        build_fields,
        find_alternatives,
        print_alternatives,
    )
    from llmcli.model_loader.header_only import planned_file
    from llmcli.model_loader.rehearsal.rehearse import rehearse_model
    from llmcli.planning.machine import read_machine
    from llmcli.planning.placement.device_shares import share_devices
    from llmcli.planning.prediction import cache_layout
    from llmcli.runtime.requests.request import RunOptions
    from quant.model_file import load_checks, read_header

    config, ui = start_command(json, offline, trust=trust)
    placement_options = placement_flags.join(ui)
    reporting.check_path()
    if measure and model_draft:
        raise UsageError(
            "--measure does not support a draft model", hint="leave out --measure or -md"
        )
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
    ).with_placement(placement_options)
    with planned_file(ref, quant, config, ui) as subject:
        header = read_header.read_header(subject.path)
        load_checks.check_loadable(header)
        rehearse_model(header, config, ui, computes=measure)
        drafting = _read_drafting(draft, model_draft)
        context, placement, reading = _resolve(
            header, options, parallel, unified, drafting, config, ui
        )
        with _with_draft(model_draft, ref, header, context, placement, config, ui) as (
            context,
            draft_planner,
        ):
            predicted, measured = _plan_and_measure(
                subject, header, context, placement, draft_planner, measure
            )
            reading_bytes = (
                receipt.prefill_context_bytes(header, reading, placement) if reading else 0
            )
            scored_bytes = receipt.sum_or_none(
                receipt.scoring_bytes(header, context_options, placement, parallel)
                for context_options in (context, reading)
                if context_options
            )
            shares = share_devices(header, options, placement, context, read_machine())
            alternatives = find_alternatives(
                header, context, placement, predicted, not subject.is_stand_in, draft_planner
            )
    checkpoint_bytes = cache_layout.checkpoint_bytes(header, context)
    title = receipt.format_title(subject.name, header, context, predicted)
    if json:
        extra_fields = {
            **build_fields(alternatives, subject.is_quantized),
            "reading_bytes": reading_bytes,
        }
        extra_fields |= {
            "scored_bytes": scored_bytes,
            "checkpoint_bytes": checkpoint_bytes,
            "outside_bytes": receipt.offload_bytes(predicted, parallel),
            "placement": devices.build_document(placement, context, shares),
        }
        actual = (
            {"actual": {**build_document(measured), **dict.fromkeys(extra_fields)}}
            if measured
            else {}
        )
        ui.result(
            {**build_document(predicted, alternatives.weight_bytes), **extra_fields, **actual}
        )
    else:
        ui.text(title + (f" · {subject.unloadable_reason}" if subject.unloadable_reason else ""))
        receipt.print_table(predicted, measured, ui)
        receipt.print_extra_bytes(predicted, parallel, reading_bytes, scored_bytes, ui)
        receipt.print_checkpoints(checkpoint_bytes, ui)
        devices.print_shares(placement, shares, ui)
        receipt.print_weight_types(alternatives.weight_bytes, ui)
        receipt.print_layers(predicted.cache, ui)
        print_alternatives(
            alternatives,
            predicted,
            context,
            header.context_length,
            ui,
            is_quantized=subject.is_quantized,
        )
    charts = page.build_charts(predicted, measured)
    show_report(
        lambda: page.build_page(title, predicted, measured, alternatives),
        lambda: charts,
        reporting,
        ui,
    )


def _plan_and_measure(
    subject: "PlannedFile",
    header: "ModelHeader",
    context: "ContextOptions",
    placement: "ModelPlacement",
    draft: "Planner | None",
    measure: bool,
) -> "tuple[MemoryPlan, MemoryPlan | None]":
    """Return the memory plan, and with `measure` also the memory of the loaded model (otherwise
    None).

    Call it before other plans are made, because each plan enlarges the process that is measured.
    Raises UserError if the model cannot be loaded.
    """
    from llmcli.planning.dry_runs import memory_plan

    if measure and subject.unloadable_reason:
        raise UserError(
            f"{subject.name} cannot be measured: {subject.unloadable_reason}",
            hint="leave out --measure",
        )
    with memory_plan.open_memory_planner(header, context, placement, draft) as planner:
        predicted = planner.memory_plan()
    if measure and predicted.fits is False:
        raise UserError(
            f"{subject.name} does not fit and was not loaded",
            hint="leave out --measure to see what it would take",
        )
    return predicted, memory_plan.measure_loaded(header, context, placement) if measure else None


@contextmanager
def _with_draft(
    draft_ref: str | None,
    ref: str,
    header: "ModelHeader",
    context: "ContextOptions",
    placement: "ModelPlacement",
    config: "Config",
    ui: "UI",
) -> "Iterator[tuple[ContextOptions, Planner | None]]":
    """Within the block, add the draft model `draft_ref` to the plan of the model `ref`. Yields the
    context options for a run with drafts, and a planner of the draft model.

    Without a draft model (`draft_ref` is None), yields `context` and None. Draft heads have no
    context: a note says what their weights take.
    """
    from llmcli.catalog.fetch import resolve_ref
    from llmcli.model_loader.header_only import planned_file
    from llmcli.model_loader.rehearsal.rehearse import rehearse_model
    from llmcli.planning.dry_runs.memory_plan import open_memory_planner
    from llmcli.runtime.draft_settings import draft_file_options, require_heads_for
    from llmcli.runtime.drafting.eagle3_match import is_eagle3, require_eagle3_match
    from llmcli.runtime.drafting.heads_file import is_heads_file
    from llmcli.runtime.drafting.pass_cost import MAX_PASS_ROWS
    from llmcli.runtime.drafting.vocabulary_match import require_same_vocabulary
    from llmcli.units import format_size
    from quant.model_file import load_checks, read_header

    if draft_ref is None:
        yield context, None
        return
    with planned_file(draft_ref, None, config, ui) as subject:
        draft_header = read_header.read_header(subject.path)
        if is_heads_file(draft_header):
            heads = require_heads_for(header, subject.path)
            ui.note(
                f"the weights of the draft heads take {format_size(heads.nbytes)} in addition, "
                "which stay in their file"
            )
            yield replace(context, n_outputs=MAX_PASS_ROWS, outputs_final_states=True), None
            return
        is_draft = is_eagle3(draft_header)
        load_checks.check_loadable(draft_header, is_draft=is_draft)
        if is_draft:
            require_eagle3_match(header, draft_header, has_weights=not subject.unloadable_reason)
        else:
            entry = resolve_ref(ref, config).entry
            require_same_vocabulary(header, draft_header, entry.draft if entry else "")
            rehearse_model(draft_header, config, ui, computes=False)
        context = replace(context, n_outputs=MAX_PASS_ROWS)
        with open_memory_planner(
            draft_header,
            draft_file_options(draft_header, context),
            placement.for_draft(),
            target=header.path if is_draft else None,
        ) as open_planner:
            yield context, open_planner


def _read_drafting(method: str, draft_ref: str | None) -> "DraftSettings":
    """Return the settings of --draft. Those of a draft model are only its memory (_with_draft).
    Raises UsageError for a method that does not need the memory of a plan.
    """
    from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings

    if method not in ("off", "mtp"):
        raise UsageError(
            f"--draft {method}: a plan knows mtp and off", hint="-md plans a draft model"
        )
    if method == "mtp" and draft_ref:
        raise UsageError("--draft mtp does not use -md", hint="leave one of them out")
    return DraftSettings(method="mtp") if method == "mtp" else NO_DRAFTING


def _resolve(
    header: "ModelHeader",
    options: "RunOptions",
    slots: int,
    unified: bool,
    drafting: "DraftSettings",
    config: "Config",
    ui: "UI",
) -> "tuple[ContextOptions, ModelPlacement, ContextOptions | None]":
    """Resolve the options as chat and serve do, but accept a context that does not fit into memory.

    Returns the options of the context and the placement of the weights. Also returns the options
    of the separate context in which serve reads prompts; None if there is no such context.
    """
    from llmcli.planning import resolve_options
    from llmcli.runtime import kv_size
    from llmcli.runtime.engine import prefill_context
    from llmcli.runtime.runner import context_options

    resolve_options.validate_options(options)
    kv_size.check_cache(header.metadata, options.cache_type_k, options.cache_type_v)
    resolved, placement = resolve_options.resolve_options(
        header, options, ui.warn, slots, note=ui.note
    )
    if unified or slots == 1:
        resolved = resolve_options.resolve_flash_attention(
            header, resolved, placement, config, slots, slots
        )
    context = replace(
        context_options(resolved, slots, drafting, placement, header), unified=unified
    )
    return (
        context,
        placement,
        prefill_context.prefill_options(context, resolved) if resolved.prefill_cells else None,
    )


def build_document(
    memory_plan: "MemoryPlan", types: dict[str, dict[str, int]] | None = None
) -> dict[str, Any]:
    """Return the JSON document of `plan --json` for a predicted or measured memory plan. Values
    that this machine cannot determine are null. `types`: bytes of the weights, by device and tensor
    type.
    """
    cache, first_share = memory_plan.cache, memory_plan.devices[0]
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
        "weights_bytes": memory_plan.sums.weights,
        "kv": {
            "bytes_per_token": cache.bytes_per_token if cache else None,
            "cells": memory_plan.n_ctx,
            "bytes": memory_plan.sums.kv,
            "layers": layers if cache else None,
        },
        "compute_bytes": memory_plan.sums.compute,
        "output_bytes": memory_plan.sums.output,
        "repacked_bytes": memory_plan.sums.repacked,
        "droppable_bytes": memory_plan.sums.droppable,
        "overhead_bytes": memory_plan.overhead,
        "process_bytes": memory_plan.process_bytes,
        "total_bytes": memory_plan.sums.total,
        "available_bytes": first_share.available,
        "fits": memory_plan.fits,
        "runs": memory_plan.can_run,
        "draft_bytes": memory_plan.draft,
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
            for share in memory_plan.devices
        ],
    }
