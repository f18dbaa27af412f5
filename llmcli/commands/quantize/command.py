"""`llmcli quantize`: parses the options, plans, writes and prints."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.command_context import start
from llmcli.commands.options.file_type import with_types
from llmcli.commands.options.files import Reading, Writing
from llmcli.commands.options.groups import grouped
from llmcli.commands.quantize.options import SplitMaxSize
from llmcli.model_loader.pickle_hint import offered
from llmcli.model_loader.rpc_workers import Workers
from llmcli.workflows.certification.certify import Verifying
from llmcli.workflows.quantization.method_settings import Known, Steering
from llmcli.workflows.quantization.size_request import Sizing
from llmcli.workflows.quantization.type_overrides import Mixing

if TYPE_CHECKING:
    from llmcli.workflows.quantization.plan_mix import Making
    from quant.methods.base import Method
    from quant.source.source import Source

DEFAULT = "Q4_K_M"


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize")(with_types(grouped(quantize)))


@offered()
def quantize(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A GGUF file, a checkpoint folder, or a model's name."),
    ],
    *,
    quant: Annotated[
        str | None,
        typer.Option("-t", "--type", metavar="TYPE", help=f"The file type; default: {DEFAULT}."),
    ] = None,
    steering: Steering,
    mixing: Mixing,
    split_max_size: SplitMaxSize = None,
    sizing: Sizing,
    verifying: Verifying,
    reading: Reading,
    writing: Writing,
    workers: Workers,
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

    config, ui = start(writing.json, writing.offline, reading.allow_pickle)
    how, wish = planning.named(steering.method), verifying.wish(writing.threads)
    steering.check(how, sizing)
    dry_run = writing.dry_run and not sizing.steered  # whether statistics are not collected
    workers.join(ui, runs=verifying.verify or (steering.runs(how) and not dry_run))
    kept = reading.keep_source or verifying.verify or steering.folds or steering.runs(how)
    model = quantize_file.find_model(source, config, ui, kept)
    kind = tensor_types.parse(quant or (model.quant if model else None) or DEFAULT)
    if quant and quant.upper() in file_types.ALIASES:
        ui.note(f"{quant.upper()} means {kind.name}")
    wishes = mixing.wishes
    sizing.check(split=bool(split_max_size), typed=bool(quant), wished=wishes.any)
    most = planning.shard_size(split_max_size) if split_max_size else 0
    place, blobs = (model.path, model.blobs) if model else (Path(source), None)
    opened = quantize_file.open_source(
        place,
        tokenizer=reading.tokenizer,
        pre=reading.pre,
        allow_pickle=reading.allow_pickle,
        blobs=blobs,
    )
    check_apart(
        [writing.out, sizing.plan_out], [*steering.files, *sizing.files, verifying.verify_text]
    )
    check_apart([sizing.plan_out], opened.files)
    certify.check_text(opened, wish)
    if writing.out and not (most or writing.dry_run):
        road.check_place(opened, writing.out.expanduser())
    making = partial(_making, opened, how, steering, verifying, most, writing.threads)
    # collecting takes long, so everything that can be refused is refused before
    if steering.runs(how):
        quantize_file.check_named(model, writing.out)
        plan_mix.rehearse(sizing, making(steering.promised), kind.name, wishes)
    known = steering.known(how, opened, writing, config, ui, dry_run=dry_run)
    plan, told = plan_mix.planned(sizing, making(known), kind.name, wishes, config, ui)
    if known.imatrix or known.moments or not writing.dry_run:
        plan = apply_folds.folded(plan, steering.fold, writing.threads, ui)
    plan_notes.tell(plan, ui)
    mixed = (
        wishes.any
        or sizing.any
        or bool(known.digests or most)
        or how.name != "ggml"
        or steering.folds
    )
    out = writing.out or (plan_mix.beside(plan) if sizing.any and model is None else None)
    with quantize_file.placed(
        plan, model, out, config, ui, mixed=mixed, dry_run=writing.dry_run
    ) as target:
        certify.check(plan, target, wish, config)
        make = (
            quantize_file.write
            if not steering.sequential
            else steering.behind(how, opened, writing, config)
        )
        report = (
            None
            if writing.dry_run
            else make(plan, target, ui, threads=writing.threads, force=writing.force)
        )
        report, found = certify.certify(plan, target, report, wish, told, config, ui)
    closing.close(plan, target, report, ui, found, told)


def _making(
    source: "Source",
    method: "Method",
    steering: Steering,
    verifying: Verifying,
    most: int,
    threads: int,
    known: Known,
) -> "Making":
    """Return a plan builder for these statistics."""
    from llmcli.workflows.quantization.plan_mix import Making
    from quant.folds import folded_source
    from quant.quantize import plan as planning

    return Making(
        source,
        lambda name, wishes: planning.plan(
            source, name, wishes, most=most, method=method.name, **known.given
        ),
        {"method": method.name, "fold": steering.fold * steering.folds, **known.digests},
        threads,
        folded_source.ROOM * steering.folds + verifying.room(source, known.texts),
    )
