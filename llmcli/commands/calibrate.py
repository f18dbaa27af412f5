"""`llmcli calibrate`: runs a text through a model, and writes statistics about the inputs of its
weight matrices. With --merge, adds up such files instead.
"""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import (
    ChunkCount,
    Flash,
    Fresh,
    Json,
    Layers,
    Threads,
    Trust,
    Ubatch,
)
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.text_input import expand_path
from llmcli.workflows.evaluation.text import DEFAULT_CTX, prepare_side

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmcli.config import Config
    from llmcli.model_loader.quantize_file import OpenedSource
    from llmcli.ui import UI
    from llmcli.workflows.calibration.calibrate import CalibrationRequest, CalibrationResult

Refs = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC",
        autocompletion=complete_models,
        help="catalog name, org/repo[:QUANT], GGUF file or folder; with --merge, files",
    ),
]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="STATS", help="The new importance matrix.")
]
MomentsOut = Annotated[
    Path | None,
    typer.Option("--moments", metavar="FILE", help="Also collect second moments, into this file."),
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        "-f",
        metavar="FILE",
        help="UTF-8 text to read; repeatable. Default: the built-in text.",
    ),
]
Ctx = Annotated[
    int, typer.Option("--ctx", "-c", "--ctx-size", min=1, help="Chunk length in tokens.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Shuffle the chunks before --chunks takes the first."),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="N(M|G)", help="Memory limit for the sums of --moments."),
]
Merge = Annotated[
    bool, typer.Option("--merge", help="Add up the calibration files SRC (also .dat).")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("calibrate")(with_option_groups(calibrate))


def calibrate(
    refs: Refs,
    out: Out,
    moments: MomentsOut = None,
    text: Texts = None,
    ctx: Ctx = DEFAULT_CTX,
    chunks: ChunkCount = None,
    seed: Seed = None,
    memory: Memory = None,
    merge: Merge = False,
    ubatch_size: Ubatch = 512,
    threads: Threads = None,
    gpu_layers: Layers = "auto",
    flash_attn: Flash = "auto",
    fresh: Fresh = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    *,
    placement_flags: PlacementGroup,
) -> None:
    """Measure how much each input of each weight matters.

    `quantize` uses the result as --imatrix STATS and --moments FILE. For each input channel of each
    weight matrix, STATS contains the sum of squared activations over a text. Its format is that of
    llama-imatrix, so that llama-quantize reads it, too. It includes the output head of models whose
    head and embedding share a tensor. An interrupted run resumes.
    """
    from llmcli.atomic_files import require_distinct_paths
    from llmcli.model_loader import float_copy
    from llmcli.planning import resolve_options
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.workflows.calibration import texts
    from llmcli.workflows.calibration.calibrate import CalibrationRequest, run_calibration
    from quant.quantize.shards import parse_size

    config, ui = start_command(json, offline, trust=trust)
    if merge:
        reading_options = {
            "--text": text,
            "--chunks": chunks,
            "--seed": seed,
            **dict.fromkeys(placement_flags.spellings, True),
        }
        _refuse_reading_options(
            {**reading_options, "--moments": moments, "--memory": memory, "--threads": threads}
        )
        _merge([expand_path(ref) for ref in refs], out, ui)
        return
    _refuse_conflicts(len(refs), memory, moments)
    if moments and flash_attn == "auto":
        flash_attn = "off"  # flash attention does not expose the attention weights
    elif moments and flash_attn == "on":
        ui.note("flash attention hides how values are mixed: gptq will have no moments for attn_v")
    options = RunOptions(ctx, threads, None, ubatch_size, ubatch_size, gpu_layers, flash_attn)
    resolve_options.validate_options(options)
    memory_bytes = parse_size(memory, "--memory", "memory") if memory else None
    options = options.with_placement(placement_flags.join(ui))
    texts.read_user_texts(text or [])  # report an unreadable text before a model is downloaded
    with _open_source(refs[0], config, ui) as opened:
        source = opened.source
        require_distinct_paths([out, moments], [*source.files, *(text or [])])
        opened.write_weights()
        with float_copy.open_runnable(source, config, ui, threads or 0) as path:
            model_side = prepare_side(path, options, ui)
            text_chunks, text_record = texts.calibration_chunks(
                model_side, text or [], chunks, seed, ui
            )
            request = CalibrationRequest(
                model_side,
                source.fingerprint,
                text_chunks,
                text_record,
                out,
                moments,
                memory_bytes,
                fresh,
            )
            result = run_calibration(request, config, ui)
    _print_result(request, result, ui)


def _refuse_conflicts(models: int, memory: str | None, moments: Path | None) -> None:
    """Raise UsageError for options that cannot be combined."""
    from llmcli.errors import UsageError

    if models > 1:
        raise UsageError(
            f"{models} models given, but only one can be calibrated",
            hint="to add up files, use --merge",
        )
    if memory and not moments:
        raise UsageError(
            "--memory limits the sums of --moments",
            hint="add --moments FILE, or leave out --memory",
        )


@contextmanager
def _open_source(ref: str, config: "Config", ui: "UI") -> "Iterator[OpenedSource]":
    """Open the model with its original weights. Only if the name requests a type (NAME:TYPE),
    quantize them to this type first. Raises UserError.
    """
    from llmcli.catalog import fetch
    from llmcli.model_loader import pickle_hint, quantize_file
    from llmcli.model_loader.prepare import fetch_or_reuse, prepare_model
    from llmcli.model_loader.quantize_file import ConverterSettings, SourceSettings

    with pickle_hint.pickle_hint(
        lambda: ["llmcli", "convert", ref, "-o", "floats.gguf", "--allow-pickle"]
    ):
        model = (
            prepare_model(ref, None, config, ui)
            if fetch.resolve_ref(ref, config).ref.quant
            else fetch_or_reuse(ref, None, config, ui, keep_source=True)
        )
        with quantize_file.open_by_converter(
            model.path, SourceSettings(), ConverterSettings(), config, ui
        ) as opened:
            yield opened


def _refuse_reading_options(options: dict[str, object]) -> None:
    """Raise UsageError if an option is set that does not apply to --merge. `options`: each flag
    with its value; None: not set.
    """
    from llmcli.errors import UsageError

    for flag, value in options.items():
        if value is not None:
            raise UsageError(
                f"{flag} cannot be combined with --merge, which reads no text",
                hint=f"leave out {flag}",
            )


def _merge(paths: list[Path], out: Path, ui: "UI") -> None:
    """Merge the calibration files of one kind into `out`, and print a summary. Raises UserError."""
    from llmcli.atomic_files import require_distinct_paths, require_writable, write_atomically
    from llmcli.errors import UserError
    from llmcli.units import format_count
    from quant.calibration import merge
    from quant.calibration.moments import is_moments_file

    require_distinct_paths([out], paths)
    require_writable(out)
    moment_files = [path for path in paths if is_moments_file(path)]
    if moment_files and len(moment_files) < len(paths):
        other = next(path for path in paths if path not in moment_files)
        raise UserError(
            f"{moment_files[0]} contains second moments, but {other} contains sums of squares",
            hint="merge files of one kind",
        )
    if moment_files:
        merged = merge.merge_moments(paths, out)
    else:
        merged, chunks = merge.merge_imatrix(paths)
        write_atomically(out, *chunks)
        if len({path.resolve() for path in paths}) < len(paths):
            ui.warn("a file is given twice and counts twice")
    for note in merged.notes:
        ui.warn(note)
    if ui.json:
        ui.result(
            {
                "path": str(out),
                "bytes": out.stat().st_size,
                "tensors": merged.tensors,
                "chunks": merged.chunks,
            }
        )
    else:
        ui.text(
            f"{out}: {merged.tensors} tensors over {merged.chunks} chunks of "
            f"{format_count(len(paths), 'file')}"
        )


def _print_result(request: "CalibrationRequest", result: "CalibrationResult", ui: "UI") -> None:
    from llmcli.units import format_count

    sums, text, out = result.sums, request.text, request.out
    unseen, zero_columns = sums.unseen_experts(), sums.dead_columns()
    for name, count in list(unseen.items())[:3]:
        ui.warn(
            f"no token reached {count} of the experts of {name}: they are quantized as if all "
            "columns were equally important"
        )
    if len(unseen) > 3:
        ui.warn(f"the same applies to {len(unseen) - 3} more tensors; a longer text may help")
    if zero_columns:
        name, count = next(iter(zero_columns.items()))
        more_note = (
            f", and columns of {format_count(len(zero_columns) - 1, 'more weight')}"
            if len(zero_columns) > 1
            else ""
        )
        ui.note(
            f"{format_count(count, 'column')} of {name}{more_note} had only zeros as input: "
            "their weights are not used"
        )
    rank_deficient = _rank_deficient(request, ui)
    if ui.json:
        ui.result(
            {
                "path": str(out),
                "bytes": out.stat().st_size,
                "tensors": len(sums.sums),
                "chunks": text.count,
                "n_ctx": text.n_ctx,
                "tokens": int(text.ids.size),
                "unseen_experts": unseen,
                "dead_columns": zero_columns,
                "resumed_chunks": result.resumed_chunks,
                "moments": str(request.moments) if request.moments else None,
                "moments_bytes": request.moments.stat().st_size if request.moments else None,
                "passes": result.passes,
                "rank_deficient": rank_deficient,
            }
        )
        return
    ui.text(
        f"{out}: {len(sums.sums)} tensors over {text.ids.size:,} tokens in {text.count} chunks of "
        f"{text.n_ctx}"
    )
    if request.moments:
        ui.text(f"{request.moments}: second moments")


def _rank_deficient(request: "CalibrationRequest", ui: "UI") -> dict[str, int]:
    """Return the weights whose second moments do not have full rank, because fewer tokens than
    columns reached the weight. The values are numbers of affected matrices (experts).

    Prints a warning with the number of tokens that the text would need.
    """
    from quant.calibration import moments

    if not request.moments:
        return {}
    thin_inputs = [
        shared_input
        for shared_input in moments.load_moments(request.moments).inputs
        if shared_input.thin_matrices
    ]
    if thin_inputs:
        worst = max(
            thin_inputs,
            key=lambda shared_input: (
                shared_input.columns / min(count for count in shared_input.counts if count)
            ),
        )
        min_rows = min(count for count in worst.counts if count)
        needed_tokens = int(request.text.ids.size * worst.columns / min_rows) + 1
        ui.warn(
            f"the text is too short for {len(thin_inputs)} of the inputs: {worst.names[0]} has "
            f"{worst.columns:,} columns and got {min_rows:,.0f} rows"
            f"{' at one expert' if worst.matrices > 1 else ''}, so its second moments do not have "
            f"full rank; about {needed_tokens:,} tokens are needed (this text has "
            f"{request.text.ids.size:,})"
        )
    return {
        name: shared_input.thin_matrices
        for shared_input in thin_inputs
        for name in shared_input.names
    }
