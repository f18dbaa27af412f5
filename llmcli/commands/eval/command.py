"""`llmcli eval`: opens the models and the text, evaluates, and prints the result."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import (
    Batch,
    ChunkCount,
    Ctx,
    Flash,
    Fresh,
    Json,
    Layers,
    Threads,
    Trust,
    TypeK,
    TypeV,
    Ubatch,
)
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.text_input import expand_path
from llmcli.workflows.evaluation.text import DEFAULT_CTX, prepare_side, read_evaluation_text

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.ui import UI

Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="REF",
        autocompletion=complete_models,
        help="The unquantized model (a REF), or a file written by --save-base.",
    ),
]
BaseFile = Annotated[
    Path | None,
    typer.Option(
        "--base-logits", metavar="FILE", help="The base's logits, from a --save-base file."
    ),
]
SaveBase = Annotated[
    Path | None,
    typer.Option(
        "--save-base",
        metavar="FILE",
        help="Save the logits of the base (or of SRC without a base) for --base-logits.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        "-f",
        metavar="FILE",
        help="UTF-8 text to evaluate on; default: the built-in text, 256 KB of plays.",
    ),
]
Quant = Annotated[
    str | None, typer.Option("--quant", metavar="TYPE", help="Quantize SRC to this type first.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("eval")(with_option_groups(evaluate))


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            autocompletion=complete_models,
            help="catalog name, org/repo[:QUANT], GGUF file or folder",
        ),
    ],
    base: Base = None,
    text: Text = None,
    ctx: Ctx = None,
    chunks: ChunkCount = None,
    save_base: SaveBase = None,
    base_logits: BaseFile = None,
    quant: Quant = None,
    batch_size: Batch = 2048,
    ubatch_size: Ubatch = 512,
    threads: Threads = None,
    gpu_layers: Layers = "auto",
    flash_attn: Flash = "auto",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    fresh: Fresh = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    *,
    placement_flags: PlacementGroup,
) -> None:
    """Measure a model's perplexity, and its divergence from a base.

    Protocol and definitions follow llama-perplexity; both models' logits are compared in float32.
    An interrupted run keeps its finished chunks: the same command resumes it. The base always uses
    an f16 cache, so that `--base SRC -ctk q8_0 -ctv q8_0` measures the cost of a cache type.
    """
    from llmcli.atomic_files import require_distinct_paths
    from llmcli.commands.eval import report
    from llmcli.model_loader.rehearsal.rehearse import rehearse_file
    from llmcli.planning import resolve_options
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.workflows.evaluation.evaluate import EvaluationRequest, run_evaluation
    from quant.evaluation.base_logits import is_base_logits, load_base_logits

    config, ui = start_command(json, offline, trust=trust)
    placement = placement_flags.join(ui)
    if base and is_base_logits(path := expand_path(base)):
        base_logits, base = path, None
    options = RunOptions(
        ctx or DEFAULT_CTX,
        threads,
        None,
        batch_size,
        ubatch_size,
        gpu_layers,
        flash_attn,
        type_k,
        type_v,
    ).with_placement(placement)
    _refuse_conflicts(base, base_logits, text, ctx, save_base)
    resolve_options.validate_options(options)
    saved_logits = load_base_logits(base_logits) if base_logits else None
    evaluated_text = None if saved_logits else read_evaluation_text(text)
    options = replace(options, ctx_size=saved_logits.n_ctx) if saved_logits else options
    model_file = _prepare_source(source, quant, config, ui).path
    rehearse_file(model_file, config, ui)
    model = prepare_side(model_file, options, ui)
    base_options = replace(options, cache_type_k="f16", cache_type_v="f16")
    base_side = None
    if base:
        base_file = _prepare_base(base, config, ui).path
        rehearse_file(base_file, config, ui)
        base_side = prepare_side(base_file, base_options, ui)
    require_distinct_paths(
        [save_base], [*model.header.files, *(base_side.header.files if base_side else ()), text]
    )
    outcome = run_evaluation(
        EvaluationRequest(
            model,
            base_side,
            saved_logits,
            evaluated_text.content if evaluated_text else None,
            chunks,
            save_base,
            fresh,
        ),
        config,
        ui,
    )
    text_name = evaluated_text.name if evaluated_text else str(base_logits)
    if saved_logits:
        saved_logits.close()
    report.print_report(
        report.EvaluationReport(outcome, model, base_side, saved_logits, text_name), ui
    )


def _refuse_conflicts(
    base: str | None,
    saved_logits: Path | None,
    text: Path | None,
    ctx: int | None,
    save: Path | None,
) -> None:
    """Raise UsageError for an option that cannot be combined with saved base logits. None: the
    option is not set.
    """
    from llmcli.errors import UsageError

    if saved_logits is None:
        return
    for flag, value in (("--base", base), ("--text", text), ("--ctx", ctx), ("--save-base", save)):
        if value is not None:
            raise UsageError(
                f"{flag} cannot be combined with saved base logits: "
                "they belong to one model and one text",
                hint=f"leave out {flag}",
            )


def _prepare_source(ref: str, quant: str | None, config: "Config", ui: "UI") -> "FetchedModel":
    from llmcli.model_loader.prepare import prepare_model

    return prepare_model(ref, quant, config, ui)


def _prepare_base(ref: str, config: "Config", ui: "UI") -> "FetchedModel":
    """Download the base model if needed, and return it as a GGUF. It is quantized only if the name
    requests a type.

    Raises UserError for a checkpoint folder without a type, because the user has to choose how it
    is rounded.
    """
    from llmcli.catalog import fetch
    from llmcli.errors import UserError
    from llmcli.model_loader.prepare import fetch_or_reuse, quantize_if_needed

    model = fetch_or_reuse(ref, None, config, ui)
    if fetch.resolve_ref(ref, config).ref.quant and model.quant:
        return quantize_if_needed(model, model.quant, config, ui)
    if model.kind == "gguf":
        return model
    raise UserError(
        f"{ref} is a checkpoint folder, but a base must be a GGUF",
        hint=f"llmcli convert {ref} -o base.gguf, then --base base.gguf; or --base {ref}:Q8_0",
    )
