"""`llmcli batch`: answers many prompts from a file with one model."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.batch.output_file import require_output
from llmcli.batch.run import LINE_FIELDS, build_rules, run_batch, without_line_options
from llmcli.commands.batch_result import print_result
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options import run
from llmcli.commands.options.arguments import REF_HELP
from llmcli.errors import UsageError
from llmcli.model_loader.open_server_model import REFUSED_FIELDS
from llmcli.units import format_count

if TYPE_CHECKING:
    from llmcli.batch.run import BatchResult
    from llmcli.ui import UI

DEFAULT_PARALLEL, MAX_PARALLEL = 16, 128
# In reproducible mode, a round computes this many sequences for each parallel answer. With more
# sequences, a round spends less of its time on the few answers that end last.
SEQUENCES_PER_ANSWER = 4
MAX_LISTED_DUPLICATES = 3  # repeated custom_ids that are listed one by one


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("batch", cls=run.run_command_without(REFUSED_FIELDS - LINE_FIELDS))(batch)


def batch(
    ctx: typer.Context,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", autocompletion=complete_models, help=REF_HELP)
    ] = None,
    lines: Annotated[
        str | None,
        typer.Argument(
            metavar="IN.jsonl",
            help="OpenAI batch lines or plain prompts; may be .gz; - is stdin.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT.jsonl", help="The output file.")
    ] = None,
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, max=MAX_PARALLEL, help="Answers at once.")
    ] = DEFAULT_PARALLEL,
    skeleton: Annotated[
        bool,
        typer.Option(
            "--skeleton", help="Skeleton-of-Thought: an outline, then its points in parallel."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start again even if results exist.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: auto, HOST:PORT, or local."),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=0,
            max=4096,
            metavar="N",
            help="With --ray: number of models; default: one per machine.",
        ),
    ] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print a summary as one JSON document on stdout.")
    ] = False,
) -> None:
    """Answer the prompts of a file, many at once.

    The same command resumes an interrupted run.
    """
    from llmcli.batch import ray_run
    from llmcli.batch.input_lines import open_input
    from llmcli.batch.request_line import duplicate_ids
    from llmcli.model_loader import open_server_model

    run_flags = run.parse_run_flags(ctx)
    ref, lines = run.choose_model_and_argument(ref, lines, run_flags.model)
    if ref is None or lines is None or out is None:
        raise UsageError(
            "batch needs a model, an input file and an output file",
            hint="llmcli batch REF IN.jsonl -o OUT.jsonl",
        )
    open_server_model.refuse_personal_flags(without_line_options(run_flags))
    target = ray_run.parse_target(ray, replicas)
    out = require_output(out.absolute(), [lines])
    config, ui = start_command(json, run_flags.offline)
    with open_input(lines, out.parent) as source:
        survey = source.survey()
        if survey.unended:
            ui.note(f"{source.name} line {survey.unended} does not end with a newline")
        duplicates = duplicate_ids(source.lines())
        for name, line, other_line in duplicates[:MAX_LISTED_DUPLICATES]:
            ui.warn(
                f"lines {line} and {other_line} have the same custom_id, {name[:100]!r}: both are "
                "answered"
            )
        if len(duplicates) > MAX_LISTED_DUPLICATES:
            ui.warn(
                f"and {format_count(len(duplicates) - MAX_LISTED_DUPLICATES, 'more line')} with a repeated custom_id"
            )
        slots = (
            min(MAX_PARALLEL, SEQUENCES_PER_ANSWER * parallel)
            if run_flags.options.reproducible
            else parallel
        )
        if target:
            request = ray_run.ClusterRequest(ref, run_flags, config, ui, slots, parallel, skeleton)
            result = ray_run.run_on_cluster(request, target, source, survey, out, force)
            _print_result(result, ui)
            return
        with open_server_model.open_server_model(
            ref, without_line_options(run_flags), config, ui, slots, max_gap_seconds=None
        ) as hosted:
            result = run_batch(
                hosted,
                build_rules(hosted, run_flags, skeleton),
                source,
                survey,
                out,
                ui,
                parallel=parallel,
                force=force,
            )
    _print_result(result, ui)


def _print_result(result: "BatchResult", ui: "UI") -> None:
    """Print the summary of a batch. Raises typer.Exit if the batch was stopped or some lines have
    no answer.
    """
    print_result(
        result,
        ui,
        {
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.cached_tokens,
            "generated_tokens": result.tokens,
        },
        "answer",
        f"to see why: grep -v '\"status_code\":200,' {shlex.quote(str(result.out))}",
    )
