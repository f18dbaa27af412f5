"""`llmcli batch`: answers many prompts from a file through one model."""

import json as json_module
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.batch.run import TOLD, carry_on, opening, rules
from llmcli.commands.command_context import start
from llmcli.commands.options import run
from llmcli.commands.options.arguments import REF
from llmcli.commands.options.run import RunCommand
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.run_flags import Flags
from llmcli.units import several

if TYPE_CHECKING:
    from llmcli.batch.executor import Work
    from llmcli.batch.input_lines import Input, Survey
    from llmcli.batch.job import Rules
    from llmcli.batch.journal import Journal
    from llmcli.batch.ray_actors import Counts
    from llmcli.model_loader.open_server_model import Hosted
    from llmcli.ui import UI

PARALLEL, MOST_PARALLEL = 16, 128
# sequences of a round in reproducible mode, per running answer: few run while the last ones end
ROUND = 4
TWINS = 3  # duplicate names that are listed one by one


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("batch", cls=RunCommand)(batch)


def batch(
    ctx: typer.Context,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help=REF)] = None,
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
        int, typer.Option("-np", "--parallel", min=1, max=MOST_PARALLEL, help="Answers at once.")
    ] = PARALLEL,
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
    from llmcli.batch.input_lines import opened
    from llmcli.batch.request_line import twins
    from llmcli.model_loader import open_server_model

    given = run.read(ctx)
    if given.model:
        if lines is not None:
            raise UsageError(f"two models given: {ref} and {given.model}", hint="leave out one")
        ref, lines = given.model, ref
    if ref is None or lines is None or out is None:
        raise UsageError(
            "batch needs a model, an input file and an output file",
            hint="llmcli batch REF IN.jsonl -o OUT.jsonl",
        )
    open_server_model.check(opening(given))
    target = ray_run.check(ray, replicas)
    out = _check_output(out.expanduser().absolute(), lines)
    config, ui = start(json, given.offline)
    with opened(lines, out.parent) as source:
        survey = source.survey()
        if survey.unended:
            ui.note(f"{source.name} line {survey.unended} does not end with a newline")
        duplicates = twins(source.lines())
        for name, line, other_line in duplicates[:TWINS]:
            ui.warn(
                f"lines {line} and {other_line} have the same custom_id, {name[:100]!r}: both are "
                "answered"
            )
        if len(duplicates) > TWINS:
            ui.warn(
                f"and {several(len(duplicates) - TWINS, 'more line')} with a repeated custom_id"
            )
        slots = min(MOST_PARALLEL, ROUND * parallel) if given.options.reproducible else parallel
        if target:
            request = ray_run.Wish(ref, given, config, ui, slots, parallel, skeleton)
            ray_run.through(request, target, source, survey, out, force)
            return
        with open_server_model.host(ref, opening(given), config, ui, slots, gap=None) as hosted:
            _run_batch(
                hosted, rules(hosted, given, skeleton), source, survey, out, (parallel, force), ui
            )


def _check_output(out: Path, lines: str) -> Path:
    """Return the output path; raises UserError, before a model is fetched, if it cannot be
    written.
    """
    from llmcli.atomic_files import check_place

    if out.parent.is_file():
        raise UserError(f"{out.parent} is a file, not a folder", hint="use another -o")
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent}", hint=f"mkdir -p '{out.parent}'")
    if (
        out.exists()
        and Path(lines).expanduser().exists()
        and out.samefile(Path(lines).expanduser())
    ):
        raise UsageError("the output file is the input file", hint="use another name for -o")
    check_place(out)
    return out


def _run_batch(
    hosted: "Hosted",
    rules: "Rules",
    source: "Input",
    survey: "Survey",
    out: Path,
    how: tuple[int, bool],
    ui: "UI",
) -> None:
    """Answer the lines with an open model and write the output file.

    Raises typer.Exit if the run was stopped or lines have no answer.
    """
    from llmcli.batch.executor import Work
    from llmcli.batch.job import Job, fingerprint
    from llmcli.batch.journal import Journal

    parallel, force = how
    batch_fingerprint = fingerprint(hosted.runner, rules, survey)
    job, journal = (
        Job(hosted.runner, rules, batch_fingerprint),
        Journal(out, batch_fingerprint, survey.count),
    )
    work = Work(
        hosted.runner, parallel, lambda index, came: journal.put(index, job.line(index, came))
    )

    def answer() -> None:
        work.run(job.tasks(line for line in source.lines() if not journal.has(line.index)))
        for name in sorted(job.renamed)[:3]:
            ui.note(f"lines that name the model {name[:100]} are answered by {hosted.name}")

    carry_on(work, journal, job.id, answer, force, ui)


def _default_fields(given: Flags) -> "dict[str, Any]":
    """Return the request fields that apply to lines that do not set them."""
    fields: dict[str, Any] = {"ignore_eos": True} if given.ignore_eos else {}
    if given.constraint:
        kind, text = given.constraint.kind, given.constraint.text
        fields |= (
            {"json_schema": json_module.loads(text)} if kind == "json_schema" else {"grammar": text}
        )
    return fields


@contextmanager
def _show_progress(work: "Work | Counts", journal: "Journal", ui: "UI") -> "Iterator[None]":
    """Show progress: a bar with tokens per second, or a line every minute if no bar is visible."""
    started_at, n_resumed = time.monotonic(), journal.finished
    n_shown, noted_at, drawn_at = n_resumed, started_at, 0.0

    def update() -> None:
        nonlocal n_shown, noted_at, drawn_at
        now = time.monotonic()
        if journal.finished > n_shown:
            bar.advance(journal.finished - n_shown)
            n_shown = journal.finished
        if now - drawn_at > 0.5:
            drawn_at = now
            rate = f"{work.tokens / (now - started_at + 1e-9):,.0f} tokens/s"
            bar.describe(f"batch · {rate}")
            if now - noted_at > TOLD and n_shown > n_resumed:
                noted_at = now
                seconds_left = (
                    (journal.count - n_shown) * (now - started_at) / (n_shown - n_resumed)
                )
                ui.note(
                    f"{n_shown:,} of {journal.count:,} lines · {rate} · {seconds_left / 60:,.0f} "
                    "min left"
                )

    with ui.bar("batch", journal.count, "lines", n_resumed) as bar:
        work.tell = update
        yield
        update()


def _print_summary(
    work: "Work | Counts",
    journal: "Journal",
    failed: int | None,
    ended: tuple[int, bool, float],
    ui: "UI",
) -> None:
    """Print the summary of a batch.

    `failed`: number of lines without an answer, None if the run was stopped; `totals`: lines that
    were finished before, whether all were, and the elapsed seconds.
    """
    out, count, (resumed, present, seconds) = journal.out, journal.count, ended
    if ui.json:
        ui.result(
            {
                "path": str(out),
                "lines": count,
                "finished": not work.stopped,
                "resumed_lines": resumed,
                "failed": failed,
                "prompt_tokens": work.prompted,
                "cached_tokens": work.cached,
                "generated_tokens": work.tokens,
                "elapsed_ms": seconds * 1000,
                "tokens_per_second": work.tokens / seconds,
            }
        )
    if work.stopped:
        ui.note(f"stopped after {journal.finished:,} of {count:,} lines; the same command resumes")
        raise typer.Exit(130)
    rate = f"{work.tokens:,} tokens in {seconds:,.1f} s, {work.tokens / seconds:,.1f} tokens/s"
    ui.text(
        f"{out}: {count:,} lines, "
        + ("already complete; --force answers them again" if present else rate)
    )
    if failed:
        command = f"grep -v '\"status_code\":200,' {shlex.quote(str(out))}"
        ui.error(f"{failed:,} of {count:,} lines have no answer", hint=f"to see why: {command}")
        raise typer.Exit(1)
