"""Runs a batch on one open model: resumes from the journal, shows progress, writes the output file,
and returns a summary.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.api.server_settings import ServerSettings
    from llmcli.batch.input_lines import BatchInput, LineSurvey
    from llmcli.batch.job import BatchRules
    from llmcli.batch.journal import BatchJournal
    from llmcli.model_loader.open_server_model import ServerModel
    from llmcli.ui import UI


PROGRESS_SECONDS = 60.0  # seconds between two progress lines if no bar is visible


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The summary of one run of a batch, which wrote the file `out`.

    - `lines`: number of lines of the batch; `n_finished`: number of lines in the journal at the
      end.
    - `resumed_lines`: number of lines that an earlier run finished; `was_complete`: whether an
      earlier run had written the complete output file, so that this run did nothing.
    - `failed`: number of lines with an error instead of an answer; None if the run was interrupted.
    - `seconds`, `tokens`, `prompt_tokens`, `cached_tokens`: counts of this run only.
    """

    out: Path
    lines: int
    n_finished: int
    resumed_lines: int
    was_complete: bool
    failed: int | None
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float

    @property
    def is_stopped(self) -> bool:
        """Whether the run was interrupted."""
        return self.failed is None

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens per second in this run."""
        return self.tokens / self.seconds


class RunCounts(Protocol):
    """The counters of a run. `on_progress` is called when one has changed. `is_stopped`: whether
    the run was interrupted.
    """

    tokens: int
    prompt_tokens: int
    cached_tokens: int
    is_stopped: bool
    on_progress: Callable[[], None]


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """The output file of a batch.

    - `title`: a word for what is computed, for the progress bar.
    - `count_failed`: function that returns how many lines of the file contain an error; None if it
      is not the complete output of this batch.
    - `finish`: function that writes the file from the complete journal.
    """

    title: str
    count_failed: Callable[[], int | None]
    finish: Callable[["BatchJournal"], None]


def answers_output(batch: str, out: Path, count: int) -> BatchOutput:
    """Return the output file `out` of a batch of answers. `batch`: its id; `count`: its lines."""
    from llmcli.batch.job import count_failed

    return BatchOutput(
        "batch", partial(count_failed, batch, out, count), lambda journal: journal.finish()
    )


def run_or_resume(
    counts: RunCounts,
    journal: "BatchJournal",
    output: "BatchOutput",
    answer_missing: Callable[[], None],
    force: bool,
    ui: "UI",
    *,
    is_reproducible: bool,
) -> BatchResult:
    """Run a batch, or resume it from its journal, and write the output file. Do nothing if the
    output file is already complete.

    - `counts`: token counters that `answer_missing` updates.
    - `output`: how the output file is written and recognized.
    - `answer_missing`: function that answers the lines which are not in the journal and appends
      them to it.
    - `force`: discard the output file and the journal of an earlier run.
    - `is_reproducible`: whether an answer does not depend on the lines that run beside it. If it
      does, a resumed run may end with other answers than an undisturbed one, and says so.
    """
    started_at, resumed = time.perf_counter(), journal.count
    was_complete = not force and output.count_failed() is not None
    if not was_complete:
        with journal.open(force=force):
            resumed = journal.n_finished
            if resumed:
                ui.note(f"resuming after {resumed:,} of {journal.count:,} lines")
            if 0 < resumed < journal.count and not is_reproducible:
                ui.note(
                    "the other answers may differ from those of an undisturbed run where two tokens "
                    "are almost equally likely, because other lines run beside them "
                    "(--reproducible rules that out)"
                )
            with _show_progress(counts, journal, output.title, ui):
                answer_missing()
            if not counts.is_stopped:
                output.finish(journal)
    return BatchResult(
        journal.out,
        journal.count,
        journal.n_finished,
        resumed,
        was_complete,
        None if counts.is_stopped else output.count_failed(),
        counts.tokens,
        counts.prompt_tokens,
        counts.cached_tokens,
        time.perf_counter() - started_at,
    )


# fields of RunFlags that are defaults for the lines of the input file
LINE_FIELDS = frozenset(("constraint", "ignore_eos"))


def without_line_options(run_flags: RunFlags) -> RunFlags:
    """Return the flags without those of LINE_FIELDS. For a batch these are default request fields
    (see build_rules), which a line can replace, and not settings of the model.
    """
    return replace(run_flags, constraint=None, ignore_eos=False)


def build_rules(hosted: "ServerModel", run_flags: RunFlags, skeleton: bool) -> "BatchRules":
    """Return the settings for answering lines, from an open model and the command-line flags.
    `skeleton`: answer by Skeleton-of-Thought.
    """
    from llmcli.batch import plans, skeleton_of_thought
    from llmcli.batch.job import BatchRules
    from llmcli.runtime.sampling import RANDOM_SEED

    plan = skeleton_of_thought.skeleton if skeleton else plans.plain
    return BatchRules(
        build_settings(hosted, run_flags, RANDOM_SEED),
        max(0, hosted.sampling.seed),
        _default_fields(run_flags),
        plan,
    )


def build_settings(hosted: "ServerModel", run_flags: RunFlags, seed: int) -> "ServerSettings":
    """Return server settings made from the command-line flags, with `seed` as the sampling seed."""
    from llmcli.api.server_settings import ServerSettings

    runner = hosted.runner
    return ServerSettings(
        (hosted.name,),
        0,
        hosted.sampling.with_values({"seed": seed}),
        hosted.system,
        run_flags.stops,
        None if run_flags.predict in (None, -1) else run_flags.predict,
        allow_repetition=run_flags.endless,
        reasoning_budget=None if run_flags.reasoning_budget == -1 else run_flags.reasoning_budget,
        max_context=min(runner.n_ctx, runner.header.context_length or runner.n_ctx),
    )


def run_batch(
    hosted: "ServerModel",
    rules: "BatchRules",
    source: "BatchInput",
    survey: "LineSurvey",
    out: Path,
    ui: "UI",
    *,
    parallel: int,
    force: bool,
) -> BatchResult:
    """Answer the lines of `source` with an open model and write the output file `out`.

    `survey`: line count and hash of `source`; `parallel`: maximum number of answers that run at the
    same time; `force`: discard the work of an earlier run. Raises UserError if the journal cannot
    be used or the input cannot be read.
    """
    from llmcli.batch.executor import BatchExecutor
    from llmcli.batch.job import BatchJob, batch_identity
    from llmcli.batch.journal import BatchJournal

    identity = batch_identity(hosted.runner, rules, survey)
    job, journal = (
        BatchJob(hosted.runner, rules, identity),
        BatchJournal(out, identity, survey.count),
    )
    executor = BatchExecutor(
        hosted.runner,
        parallel,
        lambda index, result: journal.append(index, job.output_line(index, result)),
    )

    def answer_missing() -> None:
        executor.run(job.make_tasks(line for line in source.lines() if not journal.has(line.index)))
        for name in sorted(job.other_models)[:3]:
            ui.note(f"lines that name the model {name[:100]} are answered by {hosted.name}")

    return run_or_resume(
        executor,
        journal,
        answers_output(job.id, out, survey.count),
        answer_missing,
        force,
        ui,
        is_reproducible=hosted.runner.options.reproducible,
    )


def _default_fields(run_flags: RunFlags) -> "dict[str, Any]":
    """Return the request fields that command-line flags set for lines without these fields."""
    fields: dict[str, Any] = {"ignore_eos": True} if run_flags.ignore_eos else {}
    if run_flags.constraint:
        kind, text = run_flags.constraint.kind, run_flags.constraint.text
        fields |= {"json_schema": json.loads(text)} if kind == "json_schema" else {"grammar": text}
    return fields


@contextmanager
def _show_progress(
    counts: RunCounts, journal: "BatchJournal", title: str, ui: "UI"
) -> "Iterator[None]":
    """Show progress while the with block runs: a bar with tokens per second, and a message every
    PROGRESS_SECONDS with the time left.
    """
    started_at, n_resumed = time.monotonic(), journal.n_finished
    n_shown, noted_at, drawn_at = n_resumed, started_at, 0.0

    def update() -> None:
        """Draw the bar if half a second has passed, and write the message if it is due."""
        nonlocal n_shown, noted_at, drawn_at
        now = time.monotonic()
        if journal.n_finished > n_shown:
            bar.advance(journal.n_finished - n_shown)
            n_shown = journal.n_finished
        if now - drawn_at > 0.5:
            drawn_at = now
            rate = f"{counts.tokens / (now - started_at + 1e-9):,.0f} tokens/s"
            bar.describe(f"{title} · {rate}")
            if now - noted_at > PROGRESS_SECONDS and n_shown > n_resumed:
                noted_at = now
                seconds_left = (
                    (journal.count - n_shown) * (now - started_at) / (n_shown - n_resumed)
                )
                ui.note(
                    f"{n_shown:,} of {journal.count:,} lines · {rate} · {seconds_left / 60:,.0f} "
                    "min left"
                )

    with ui.bar(title, journal.count, "lines", n_resumed) as bar:
        counts.on_progress = update
        yield
        update()
