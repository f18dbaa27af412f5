"""`llmcli batch`: many prompts through one model at once, into a file. Parse, open, go through the
lines, tell.
"""

import json as json_module
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands import flags
from llmcli.commands.chat import REF
from llmcli.commands.flags import Flags, RunCommand
from llmcli.commands.show import start
from llmcli.errors import UsageError, UserError
from llmcli.units import several

if TYPE_CHECKING:
    from llmcli.commands.hosting import Hosted
    from llmcli.serve.batch.job import Rules
    from llmcli.serve.batch.journal import Journal
    from llmcli.serve.batch.lines import Input, Survey
    from llmcli.serve.batch.spread import Counts
    from llmcli.serve.batch.work import Work
    from llmcli.serve.settings import Settings
    from llmcli.ui import UI

PARALLEL, MOST_PARALLEL = 16, 128
# sequences of a round of the reproducible mode, for each that runs: while the last ones end few run
ROUND = 4
TWINS = 3  # lines with another's name that are told one by one
TOLD = 60.0  # seconds between two lines about how far it is, where nobody sees a bar


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("batch", cls=RunCommand)(batch)


def batch(
    ctx: typer.Context,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help=REF)] = None,
    lines: Annotated[
        str | None,
        typer.Argument(
            metavar="IN.jsonl", help="OpenAI batch lines or plain prompts; .gz too, - is stdin."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT.jsonl", help="Where the answers go.")
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
    force: Annotated[bool, typer.Option("--force", help="Begin anew, whatever is there.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Spread over a Ray cluster: auto, HOST:PORT, or local."
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=0, max=4096, metavar="N", help="With --ray: so many models; default: one a machine."
        ),
    ] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document about it on stdout.")
    ] = False,
) -> None:
    """Answer the prompts of a file, many at once; a run that was stopped goes on with the same
    command.
    """
    from llmcli.commands import hosting, spreading
    from llmcli.serve.batch.asked import twins
    from llmcli.serve.batch.lines import opened

    given = flags.read(ctx)
    if given.model:
        if lines is not None:
            raise UsageError(f"two models: {ref} and {given.model}", hint="leave one of them out")
        ref, lines = given.model, ref
    if ref is None or lines is None or out is None:
        raise UsageError(
            "a batch takes a model, lines and a place",
            hint="llmcli batch REF IN.jsonl -o OUT.jsonl",
        )
    hosting.check(opening(given))
    where = spreading.check(ray, replicas)
    out = _place(out.expanduser().absolute(), lines)
    config, ui = start(json, given.offline)
    with opened(lines, out.parent) as source:
        survey = source.survey()
        if survey.unended:
            ui.note(
                f"{source.name} line {survey.unended} has no newline at its end; it is taken as it is"
            )
        same = twins(source.lines())
        for name, one, other in same[:TWINS]:
            ui.warn(
                f"lines {one} and {other} have the same custom_id, {name[:100]!r}: each is answered in its place"
            )
        if len(same) > TWINS:
            ui.warn(f"and {several(len(same) - TWINS, 'line')} more with the custom_id of another")
        slots = min(MOST_PARALLEL, ROUND * parallel) if given.options.reproducible else parallel
        if where:
            wish = spreading.Wish(ref, given, config, ui, slots, parallel, skeleton)
            spreading.through(wish, where, source, survey, out, force)
            return
        with hosting.host(ref, opening(given), config, ui, slots, gap=None) as hosted:
            _through(
                hosted, rules(hosted, given, skeleton), source, survey, out, (parallel, force), ui
            )


def _place(out: Path, lines: str) -> Path:
    """Where the answers may go; raises UserError, before a model is fetched."""
    from llmcli.catalog.partial import check_place

    if out.parent.is_file():
        raise UserError(f"{out.parent} is a file, no folder", hint="choose another place with -o")
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent}", hint=f"mkdir -p '{out.parent}'")
    if (
        out.exists()
        and Path(lines).expanduser().exists()
        and out.samefile(Path(lines).expanduser())
    ):
        raise UsageError(
            "the answers would take the place of the lines", hint="give -o another name"
        )
    check_place(out)
    return out


def _through(
    hosted: "Hosted",
    rules: "Rules",
    source: "Input",
    survey: "Survey",
    out: Path,
    how: tuple[int, bool],
    ui: "UI",
) -> None:
    """From an open model to the file; raises typer.Exit where it is not whole or lines have no
    answer.
    """
    from llmcli.serve.batch.job import Job, fingerprint
    from llmcli.serve.batch.journal import Journal
    from llmcli.serve.batch.work import Work

    parallel, force = how
    about = fingerprint(hosted.runner, rules, survey)
    job, journal = Job(hosted.runner, rules, about), Journal(out, about, survey.count)
    work = Work(
        hosted.runner, parallel, lambda index, came: journal.put(index, job.line(index, came))
    )

    def answer() -> None:
        work.run(job.tasks(line for line in source.lines() if not journal.has(line.index)))
        for name in sorted(job.renamed)[:3]:
            ui.note(f"lines that name the model {name[:100]} were answered by {hosted.name}")

    carry_on(work, journal, job.id, answer, force, ui)


def carry_on(
    work: "Work | Counts",
    journal: "Journal",
    batch: str,
    answer: Callable[[], None],
    force: bool,
    ui: "UI",
) -> None:
    """From what the journal has of the batch of that id to the file: `answer` makes what is
    missing, `work` counts it.

    Raises typer.Exit where the file is not whole or lines have no answer.
    """
    from llmcli.serve.batch.job import failed

    began, resumed = time.perf_counter(), journal.count
    present = not force and failed(batch, journal.out, journal.count) is not None
    if not present:
        with journal.open(force=force):
            resumed = journal.finished
            if resumed:
                ui.note(f"going on after {resumed:,} of {journal.count:,} lines")
            with _told(work, journal, ui):
                answer()
            if not work.stopped:
                journal.finish()
    failures = None if work.stopped else failed(batch, journal.out, journal.count)
    _close(work, journal, failures, (resumed, present, time.perf_counter() - began), ui)


def opening(given: Flags) -> Flags:
    """The flags without those that are every line's own, which the model is not opened with."""
    return replace(given, constraint=None, ignore_eos=False)


def _defaults(given: Flags) -> "dict[str, Any]":
    """Those, as fields of lines that say nothing of them."""
    found: dict[str, Any] = {"ignore_eos": True} if given.ignore_eos else {}
    if given.constraint:
        kind, text = given.constraint.kind, given.constraint.text
        found |= (
            {"json_schema": json_module.loads(text)} if kind == "json_schema" else {"grammar": text}
        )
    return found


def rules(hosted: "Hosted", given: Flags, skeleton: bool) -> "Rules":
    """How lines are answered where they say nothing of it."""
    from llmcli.runtime.sampling import RANDOM
    from llmcli.serve.batch import plans
    from llmcli.serve.batch import skeleton as outlined
    from llmcli.serve.batch.job import Rules

    plan = outlined.skeleton if skeleton else plans.plain
    return Rules(
        settings(hosted, given, RANDOM), max(0, hosted.sampling.seed), _defaults(given), plan
    )


def settings(hosted: "Hosted", given: Flags, seed: int) -> "Settings":
    """What was typed, as the server's settings."""
    from llmcli.serve.settings import Settings

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


@contextmanager
def _told(work: "Work | Counts", journal: "Journal", ui: "UI") -> "Iterator[None]":
    """Progress: a bar with tokens per second and the time left; a line a minute where nobody sees
    it.
    """
    began, first = time.monotonic(), journal.finished
    seen, spoken, drawn = first, began, 0.0

    def tell() -> None:
        nonlocal seen, spoken, drawn
        now = time.monotonic()
        if journal.finished > seen:
            bar.advance(journal.finished - seen)
            seen = journal.finished
        if now - drawn > 0.5:
            drawn = now
            rate = f"{work.tokens / (now - began + 1e-9):,.0f} tokens/s"
            bar.describe(f"batch · {rate}")
            if now - spoken > TOLD and seen > first:
                spoken = now
                left = (journal.count - seen) * (now - began) / (seen - first)
                ui.note(f"{seen:,} of {journal.count:,} lines · {rate} · {left / 60:,.0f} min left")

    with ui.bar("batch", journal.count, "lines", first) as bar:
        work.tell = tell
        yield
        tell()


def _close(
    work: "Work | Counts",
    journal: "Journal",
    failed: int | None,
    ended: tuple[int, bool, float],
    ui: "UI",
) -> None:
    """Tell what came of it, `failed` lines having no answer; `ended`: lines that were there before,
    whether all of it was, and seconds.
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
        ui.note(f"stopped after {journal.finished:,} of {count:,} lines; the same command goes on")
        raise typer.Exit(130)
    rate = f"{work.tokens:,} tokens in {seconds:,.1f} s, {work.tokens / seconds:,.1f} tokens/s"
    ui.text(
        f"{out}: {count:,} lines, " + ("made before; --force makes it anew" if present else rate)
    )
    if failed:
        found = f"grep -v '\"status_code\":200,' {shlex.quote(str(out))}"
        ui.error(f"{failed:,} of {count:,} lines have no answer", hint=f"they say why: {found}")
        raise typer.Exit(1)
