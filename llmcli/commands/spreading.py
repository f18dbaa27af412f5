"""`batch --ray`: answers the lines with models on a Ray cluster; the journal is on this machine."""

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
    """The address of the cluster, and the number of models on it (0: one per machine)."""

    address: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Wish:
    """The model to open on each machine, as a value that can be sent to the cluster.

    `slots`: sequences, of which `parallel` run at once.
    """

    ref: str
    given: "Flags"
    config: "Config"
    ui: "UI"
    slots: int
    parallel: int
    skeleton: bool


@contextmanager
def opened(request: Wish) -> "Iterator[tuple[Runner, Rules]]":
    """Open the model; yield it and the rules by which lines are answered."""
    from llmcli.commands import hosting
    from llmcli.commands.batch import opening, rules

    with hosting.host(
        request.ref, opening(request.given), request.config, request.ui, request.slots, gap=None
    ) as hosted:
        yield hosted.runner, rules(hosted, request.given, request.skeleton)


def through(
    request: Wish, where: Where, source: "Input", survey: "Survey", out: "Path", force: bool
) -> None:
    """Answer the lines on the cluster and write the output file.

    Raises UserError, and typer.Exit if the run was stopped or lines have no answer.
    """
    from llmcli.commands import apart, batch
    from llmcli.serve.batch.job import id_of
    from llmcli.serve.batch.journal import Journal

    if request.given.rpc:
        raise UsageError(
            "an RPC worker serves one client, not several models", hint="leave out --ray or --rpc"
        )
    local = where.address == apart.HERE
    apart.need_ray(local)
    from llmcli.serve.batch import spread
    from llmcli.serve.replicas import cluster

    n_replicas = where.replicas or 1
    if local:
        request = replace(request, given=apart.shared(request.given, n_replicas))
    open_job, counts = partial(opened, request), spread.Counts()
    with cluster(
        None if local else where.address, n_replicas + 1
    ) as machines:  # one CPU is for Ray Data itself
        identity = spread.identity(open_job, survey, 1.0)
        journal, plan = (
            Journal(out, identity, survey.count),
            spread.Plan(where.replicas or machines, request.parallel),
        )

        def answer() -> None:
            missing = (line for line in source.lines() if not journal.has(line.index))
            _store_answers(
                spread.spread(missing, open_job, survey, identity, plan, counts), journal, counts
            )

        batch.carry_on(counts, journal, id_of(identity), answer, force, request.ui)


def _store_answers(
    answers: "Iterator[tuple[int, bytes]]", journal: "Journal", counts: "Counts"
) -> None:
    """Store each line once as it arrives; Ctrl-C stops with the lines that have arrived."""
    try:
        for index, line in answers:
            if not journal.has(index):  # a block that failed halfway is answered twice
                journal.put(index, line)
            counts.tell()
    except KeyboardInterrupt:
        counts.stopped = True


def check(address: str | None, replicas: int) -> Where | None:
    """Return the requested cluster, None without --ray; raises UsageError."""
    if address is None:
        if replicas:
            raise UsageError(
                "--replicas needs a Ray cluster",
                hint="add --ray ADDRESS (local: on this machine)",
            )
        return None
    return Where(address, replicas)
