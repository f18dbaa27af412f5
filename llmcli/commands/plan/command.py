"""`llmcli plan`: predicts the memory of a run without loading the model, and prints it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    NgramDraft,
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
    from llmcli.planning.dry_runs.memory_plan import DraftMemory, MemoryPlan
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
    draft: DraftMethod = "auto",
    model_draft: Draft = None,
    ngram_draft: NgramDraft = "auto",
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
    from llmcli.planning.prediction import cache_layout, key_precision
    from llmcli.runtime.draft_settings import require_prediction_layers
    from llmcli.runtime.requests.request import RunOptions
    from quant.model_file import load_checks, read_header

    config, ui = start_command(json, offline, trust=trust)
    placement_options = placement_flags.join(ui)
    reporting.check_path()
    draft, ngram_draft = _read_draft_options(draft, ngram_draft, model_draft)
    if measure and model_draft:
        raise UsageError(
            "--measure does not support a draft file", hint="leave out --measure or -md"
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
        require_prediction_layers(draft, header)
        rehearse_model(header, config, ui, computes=measure)
        with ExitStack() as stack:
            drafting = stack.enter_context(
                _open_drafting(draft, ngram_draft, model_draft, ref, header, config, ui)
            )
            context, placement, reading = _resolve(
                header, options, parallel, unified, drafting, config, ui
            )
            draft_memory = stack.enter_context(
                _open_draft_memory(drafting, header, context, placement)
            )
            predicted, measured = _plan_and_measure(
                subject, header, context, placement, draft_memory, measure
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
                header, context, placement, predicted, not subject.is_stand_in, draft_memory
            )
            # here, because a stand-in for a model that is not downloaded is removed afterwards
            key_losses = [
                loss
                for kind in (context.type_k, *alternatives.supported_types)
                if (loss := key_precision.describe_key_loss(header, kind))
            ]
    checkpoint_bytes = cache_layout.checkpoint_bytes(header, context)
    outside_bytes = receipt.offload_bytes(predicted, parallel, checkpoint_bytes)
    max_checkpoint_bytes = receipt.max_checkpoint_bytes(checkpoint_bytes, parallel, outside_bytes)
    title = receipt.format_title(subject.name, header, context, predicted)
    if json:
        extra_fields = {
            **build_fields(alternatives, subject.is_quantized),
            "reading_bytes": reading_bytes,
        }
        extra_fields |= {
            "scored_bytes": scored_bytes,
            "checkpoint_bytes": checkpoint_bytes,
            "max_checkpoint_bytes": max_checkpoint_bytes,
            "outside_bytes": outside_bytes,
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
        draft_kind = "draft heads" if drafting.heads else "draft model"
        receipt.print_table(predicted, measured, max_checkpoint_bytes, draft_kind, ui)
        receipt.print_extra_bytes(outside_bytes, parallel, reading_bytes, scored_bytes, ui)
        receipt.print_checkpoints(checkpoint_bytes, outside_bytes, ui)
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
        if key_losses:
            ui.note(key_losses[0])
    charts = page.build_charts(predicted, measured)
    show_report(
        lambda: page.build_page(title, predicted, measured, max_checkpoint_bytes, alternatives),
        lambda: charts,
        reporting,
        ui,
    )


def _plan_and_measure(
    subject: "PlannedFile",
    header: "ModelHeader",
    context: "ContextOptions",
    placement: "ModelPlacement",
    draft: "DraftMemory | None",
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


def _read_draft_options(method: str, ngram: str, draft_ref: str | None) -> tuple[str, str]:
    """Return the values of --draft and --ngram-draft. Raises UserError, and UsageError for options
    that `run` refuses together.
    """
    from llmcli.commands.options.run import check_conflicts
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.draft_settings import (
        parse_method,
        parse_ngram_draft,
        require_draft_file,
    )
    from llmcli.runtime.requests.beam_settings import NO_SEARCH
    from llmcli.runtime.requests.request import RunOptions

    method, ngram = parse_method(method), parse_ngram_draft(ngram)
    check_conflicts(
        RunFlags(
            RunOptions(),
            {},
            NO_SEARCH,
            draft=method,
            ngram_draft=ngram,
            model_draft=draft_ref,
        )
    )
    require_draft_file("--draft", method, draft_ref)
    return method, ngram


@contextmanager
def _open_drafting(
    method: str,
    ngram: str,
    draft_ref: str | None,
    ref: str,
    header: "ModelHeader",
    config: "Config",
    ui: "UI",
) -> "Iterator[DraftSettings]":
    """Return the settings of --draft, --ngram-draft and --model-draft. The draft file `draft_ref`
    for the model `ref`, or its stand-in, exists within the block.
    """
    from llmcli.catalog.fetch import resolve_ref
    from llmcli.model_loader.header_only import planned_file
    from llmcli.model_loader.rehearsal.rehearse import rehearse_model
    from llmcli.runtime.draft_settings import choose_drafting
    from llmcli.runtime.drafting.draft_files.eagle3_match import EAGLE3
    from quant.model_file import read_header

    settings = choose_drafting(method, ngram, has_file=draft_ref is not None)
    if draft_ref is None:
        yield settings
        return
    with planned_file(draft_ref, None, config, ui) as subject:
        entry = resolve_ref(ref, config).entry
        settings = replace(settings, model=subject.path).for_draft_file(
            header, entry.draft if entry else "", has_weights=not subject.unloadable_reason
        )
        if not settings.heads and settings.method != EAGLE3:
            rehearse_model(read_header.read_header(subject.path), config, ui, computes=False)
        yield settings


@contextmanager
def _open_draft_memory(
    drafting: "DraftSettings",
    header: "ModelHeader",
    context: "ContextOptions",
    placement: "ModelPlacement",
) -> "Iterator[DraftMemory | None]":
    """Yield the planner of the draft model or of the EAGLE-3 draft for a model with this header and
    context, or the memory of draft heads; None without any.
    """
    from llmcli.planning.dry_runs.memory_plan import HeadsMemory, open_memory_planner
    from llmcli.runtime.drafting.draft_contexts import draft_file_options
    from llmcli.runtime.drafting.draft_files.eagle3_match import is_eagle3
    from quant.model_file import read_header

    if drafting.model is None:
        yield HeadsMemory(drafting.heads.nbytes) if drafting.heads else None
        return
    draft_header = read_header.read_header(drafting.model)
    with open_memory_planner(
        draft_header,
        draft_file_options(draft_header, context),
        placement.for_draft(),
        target=header.path if is_eagle3(draft_header) else None,
    ) as planner:
        yield planner


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
        header, options, ui.warn, slots, note=ui.note, config=config
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
