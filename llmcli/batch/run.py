"""A batch on one model: journal, progress, summary."""

import json as json_module
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmcli.model_loader.run_flags import Flags

if TYPE_CHECKING:
    from llmcli.api.server_settings import Settings
    from llmcli.batch.executor import Work
    from llmcli.batch.job import Rules
    from llmcli.batch.journal import Journal
    from llmcli.batch.ray_actors import Counts
    from llmcli.model_loader.open_server_model import Hosted
    from llmcli.ui import UI


TOLD = 60.0  # seconds between two progress lines if no bar is visible


def carry_on(
    work: "Work | Counts",
    journal: "Journal",
    batch: str,
    answer: Callable[[], None],
    force: bool,
    ui: "UI",
) -> None:
    """Run a batch, or resume it from its journal, and write the output file.

    `batch_id` identifies the batch; `answer_missing` answers the missing lines; `counts` has the
    number of tokens. Raises typer.Exit if the run was stopped or lines have no answer.
    """
    from llmcli.batch.job import failed

    started_at, resumed = time.perf_counter(), journal.count
    present = not force and failed(batch, journal.out, journal.count) is not None
    if not present:
        with journal.open(force=force):
            resumed = journal.finished
            if resumed:
                ui.note(f"resuming after {resumed:,} of {journal.count:,} lines")
            with _show_progress(work, journal, ui):
                answer()
            if not work.stopped:
                journal.finish()
    failures = None if work.stopped else failed(batch, journal.out, journal.count)
    _print_summary(
        work, journal, failures, (resumed, present, time.perf_counter() - started_at), ui
    )


def opening(given: Flags) -> Flags:
    """Return the flags without those that apply to single lines instead of the model."""
    return replace(given, constraint=None, ignore_eos=False)


def rules(hosted: "Hosted", given: Flags, skeleton: bool) -> "Rules":
    """Return the rules by which lines are answered unless they say otherwise."""
    from llmcli.batch import plans
    from llmcli.batch import skeleton_of_thought as outlined
    from llmcli.batch.job import Rules
    from llmcli.runtime.sampling import RANDOM

    plan = outlined.skeleton if skeleton else plans.plain
    return Rules(
        settings(hosted, given, RANDOM), max(0, hosted.sampling.seed), _default_fields(given), plan
    )


def settings(hosted: "Hosted", given: Flags, seed: int) -> "Settings":
    """Return the typed options as server settings."""
    from llmcli.api.server_settings import Settings

    runner = hosted.runner
    return Settings(
        (hosted.name,),
        0,
        hosted.sampling.with_values({"seed": seed}),
        hosted.system,
        given.stops,
        None if given.predict in (None, -1) else given.predict,
        most_context=min(runner.n_ctx, runner.header.context_length or runner.n_ctx),
    )


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.batch.executor import Work
    from llmcli.batch.input_lines import Input, Survey
    from llmcli.batch.job import Rules
    from llmcli.batch.journal import Journal
    from llmcli.batch.ray_actors import Counts
    from llmcli.model_loader.open_server_model import Hosted
    from llmcli.ui import UI


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
