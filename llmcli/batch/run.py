"""A batch on one model: journal, progress, summary."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcli.commands.batch import _default_fields, _print_summary, _show_progress
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
