"""`llmcli quantize`: parses the options, plans, writes and prints."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.command_context import start_command
from llmcli.commands.options.arguments import Json
from llmcli.commands.options.file_type import with_type_flags
from llmcli.commands.options.files import Offline, OutputOptions, SourceOptions
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.rpc import RpcOptions
from llmcli.commands.quantize.options import (
    MethodOptions,
    SizeOptions,
    SplitMaxSize,
    TensorTypeOptions,
    VerifyOptions,
)
from llmcli.model_loader.pickle_hint import pickle_hint
from llmcli.workflows.certification.certify import VerifySettings
from llmcli.workflows.quantization.method_settings import MeasuredInputs, MethodSettings

if TYPE_CHECKING:
    from llmcli.workflows.quantization.plan_mix import PlanBuilder
    from quant.methods.base import Method
    from quant.source.source import Source

DEFAULT_TYPE = "Q4_K_M"


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize")(with_type_flags(with_option_groups(quantize)))


@pickle_hint()
def quantize(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A GGUF file, a checkpoint folder, or a model's name."),
    ],
    *,
    quant: Annotated[
        str | None,
        typer.Option(
            "-t", "--type", metavar="TYPE", help=f"The file type; default: {DEFAULT_TYPE}."
        ),
    ] = None,
    steering: MethodOptions,
    mixing: TensorTypeOptions,
    split_max_size: SplitMaxSize = None,
    sizing: SizeOptions,
    verifying: VerifyOptions,
    reading: SourceOptions,
    writing: OutputOptions,
    offline: Offline = False,
    json: Json = False,
    workers: RpcOptions,
) -> None:
    """Quantize a checkpoint folder or a GGUF.

    The new GGUF is written in one pass, on all cores.
    """
    from llmcli.atomic_files import check_apart
    from llmcli.commands.quantize import report as closing
    from llmcli.model_loader import plan_notes, quantize_file
    from llmcli.workflows.certification import certify
    from llmcli.workflows.quantization import apply_folds, plan_mix
    from quant.quantize import plan as planning
    from quant.quantize import write as road
    from quant.recipes import file_types, tensor_types

    config, ui = start_command(json, offline, reading.allow_pickle)
    how, wish = planning.method_by_name(steering.method), verifying.build_request(writing.threads)
    steering.validate(how, sizing)
    dry_run = (
        writing.dry_run and not sizing.needs_statistics
    )  # whether statistics are not collected
    workers.join(
        ui, runs_model=verifying.verify or (steering.needs_running_model(how) and not dry_run)
    )
    kept = (
        reading.keep_source
        or verifying.verify
        or steering.has_fold
        or steering.needs_running_model(how)
    )
    model = quantize_file.find_model(source, config, ui, kept)
    kind = tensor_types.parse_file_type(quant or (model.quant if model else None) or DEFAULT_TYPE)
    if quant and quant.upper() in file_types.FILE_TYPE_ALIASES:
        ui.note(f"{quant.upper()} means {kind.name}")
    wishes = mixing.recipe_overrides
    sizing.validate(
        is_split=bool(split_max_size), has_file_type=bool(quant), has_overrides=wishes.is_set
    )
    most = planning.parse_size(split_max_size) if split_max_size else 0
    place, blobs = (model.path, model.blobs) if model else (Path(source), None)
    opened = quantize_file.open_source(
        place,
        tokenizer=reading.tokenizer,
        pre=reading.pre,
        allow_pickle=reading.allow_pickle,
        blobs=blobs,
    )
    check_apart(
        [writing.out, sizing.plan_out],
        [*steering.input_files, *sizing.input_files, verifying.verify_text],
    )
    check_apart([sizing.plan_out], opened.files)
    certify.check_text(opened, wish)
    if writing.out and not (most or writing.dry_run):
        road.require_writable_file(opened, writing.out.expanduser())
    making = partial(_plan_builder, opened, how, steering, verifying, most, writing.threads)
    # collecting takes long, so everything that can be refused is refused before
    if steering.needs_running_model(how):
        quantize_file.require_output_path(model, writing.out)
        plan_mix.validate(sizing, making(steering.placeholder_inputs), kind.name, wishes)
    known = steering.collect_inputs(how, opened, writing.threads, config, ui, dry_run=dry_run)
    plan, told = plan_mix.build_plan(sizing, making(known), kind.name, wishes, config, ui)
    if known.imatrix or known.moments or not writing.dry_run:
        plan = apply_folds.apply_folds(plan, steering.fold, writing.threads, ui)
    plan_notes.print_plan_notes(plan, ui)
    mixed = (
        wishes.is_set
        or sizing.overrides_recipe
        or bool(known.digests or most)
        or how.name != "ggml"
        or steering.has_fold
    )
    out = writing.out or (
        plan_mix.default_output(plan) if sizing.overrides_recipe and model is None else None
    )
    with quantize_file.output_path(
        plan, model, out, config, ui, is_custom=mixed, dry_run=writing.dry_run
    ) as target:
        certify.require_disk_space(plan, target, wish, config)
        make = (
            quantize_file.write_with_progress
            if not steering.sequential
            else steering.blockwise_writer(how, opened, writing.threads, config)
        )
        report = (
            None
            if writing.dry_run
            else make(plan, target, ui, threads=writing.threads, force=writing.force)
        )
        report, found = certify.certify(plan, target, report, wish, told, config, ui)
    closing.print_result(plan, target, report, ui, found, told)


def _plan_builder(
    source: "Source",
    method: "Method",
    steering: MethodSettings,
    verifying: VerifySettings,
    max_shard_bytes: int,
    threads: int,
    inputs: MeasuredInputs,
) -> "PlanBuilder":
    """Return a plan builder for these statistics."""
    from llmcli.workflows.quantization.plan_mix import PlanBuilder
    from quant.folds import folded_source
    from quant.quantize import plan as planning

    return PlanBuilder(
        source,
        lambda name, wishes: planning.plan_quantization(
            source,
            name,
            wishes,
            imatrix=inputs.imatrix,
            max_shard_bytes=max_shard_bytes,
            method=method.name,
            moments=inputs.moments,
            expected=inputs.pending,
        ),
        {"method": method.name, "fold": steering.fold * steering.has_fold, **inputs.digests},
        threads,
        folded_source.HEADER_RESERVE_BYTES * steering.has_fold
        + verifying.reserved_bytes(source, inputs.text_names),
    )
