"""`batch --ray`: the lines go to models on the machines of a Ray cluster, the journal stays here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from llmcli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.commands.flags import Flags
    from llmcli.config import Config
    from llmcli.runtime.runner import Runner
    from llmcli.serve.batch.job import Rules
    from llmcli.serve.batch.journal import Journal
    from llmcli.serve.batch.lines import Input, Survey
    from llmcli.serve.batch.spread import Counts
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class Where:
    """The cluster, and how many models on it (0: one a machine)."""

    address: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Wish:
    """Which model, opened with how many sequences, of which `parallel` run; it travels to the
    cluster.
    """

    ref: str
    given: "Flags"
    config: "Config"
    ui: "UI"
    slots: int
    parallel: int
    skeleton: bool


@contextmanager
def opened(wish: Wish) -> "Iterator[tuple[Runner, Rules]]":
    """The model, open, and how lines are answered."""
    from llmcli.commands import hosting
    from llmcli.commands.batch import opening, rules

    with hosting.host(
        wish.ref, opening(wish.given), wish.config, wish.ui, wish.slots, gap=None
    ) as hosted:
        yield hosted.runner, rules(hosted, wish.given, wish.skeleton)


def through(
    wish: Wish, where: Where, source: "Input", survey: "Survey", out: "Path", force: bool
) -> None:
    """From lines to the file; raises typer.Exit where it is not whole or lines have no answer."""
    from llmcli.commands import apart, batch
    from llmcli.serve.batch.job import id_of
    from llmcli.serve.batch.journal import Journal

    if wish.given.rpc:
        raise UsageError(
            "a worker serves one client, not several models", hint="leave out --ray or --rpc"
        )
    local = where.address == apart.HERE
    apart.need_ray(local)
    from llmcli.serve.batch import spread
    from llmcli.serve.replicas import cluster

    count = where.replicas or 1
    if local:
        wish = replace(wish, given=apart.shared(wish.given, count))
    open_job, counts = partial(opened, wish), spread.Counts()
    with cluster(
        None if local else where.address, count + 1
    ) as machines:  # one CPU for Ray Data itself
        about = spread.identity(open_job, survey, 1.0)
        journal, plan = (
            Journal(out, about, survey.count),
            spread.Plan(where.replicas or machines, wish.parallel),
        )

        def answer() -> None:
            missing = (line for line in source.lines() if not journal.has(line.index))
            _collect(spread.spread(missing, open_job, survey, about, plan, counts), journal, counts)

        batch.carry_on(counts, journal, id_of(about), answer, force, wish.ui)


def _collect(answers: "Iterator[tuple[int, bytes]]", journal: "Journal", counts: "Counts") -> None:
    """Keep each line as it comes, once; Ctrl-C ends it with what there is."""
    try:
        for index, line in answers:
            if not journal.has(index):  # a block that was lost half-way came twice
                journal.put(index, line)
            counts.tell()
    except KeyboardInterrupt:
        counts.stopped = True


def check(address: str | None, replicas: int) -> Where | None:
    """What was typed; raises UsageError."""
    if address is None:
        if replicas:
            raise UsageError(
                "--replicas are on a Ray cluster", hint="add --ray ADDRESS (local: on this machine)"
            )
        return None
    return Where(address, replicas)
