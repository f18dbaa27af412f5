"""`batch --ray`: answers the lines with models on a Ray cluster; the journal is on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from llmcli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.batch.input_lines import Input, Survey
    from llmcli.batch.job import Rules
    from llmcli.batch.journal import Journal
    from llmcli.batch.ray_actors import Counts
    from llmcli.config import Config
    from llmcli.model_loader.run_flags import Flags
    from llmcli.runtime.runner import Runner
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
    from llmcli.batch.run import opening, rules
    from llmcli.model_loader import open_server_model

    with open_server_model.host(
        request.ref, opening(request.given), request.config, request.ui, request.slots, gap=None
    ) as hosted:
        yield hosted.runner, rules(hosted, request.given, request.skeleton)


def through(
    request: Wish, where: Where, source: "Input", survey: "Survey", out: "Path", force: bool
) -> None:
    """Answer the lines on the cluster and write the output file.

    Raises UserError, and typer.Exit if the run was stopped or lines have no answer.
    """
    from llmcli.batch import run
    from llmcli.batch.job import id_of
    from llmcli.batch.journal import Journal
    from llmcli.hardware import ray_cluster
    from llmcli.model_loader import run_flags

    if request.given.rpc:
        raise UsageError(
            "an RPC worker serves one client, not several models", hint="leave out --ray or --rpc"
        )
    local = where.address == ray_cluster.HERE
    ray_cluster.need_ray(local)
    from llmcli.batch import ray_actors
    from llmcli.hardware.ray_cluster import cluster

    n_replicas = where.replicas or 1
    if local:
        request = replace(request, given=run_flags.shared(request.given, n_replicas))
    open_job, counts = partial(opened, request), ray_actors.Counts()
    with cluster(
        None if local else where.address, n_replicas + 1
    ) as machines:  # one CPU is for Ray Data itself
        identity = ray_actors.identity(open_job, survey, 1.0)
        journal, plan = (
            Journal(out, identity, survey.count),
            ray_actors.Plan(where.replicas or machines, request.parallel),
        )

        def answer() -> None:
            missing = (line for line in source.lines() if not journal.has(line.index))
            _store_answers(
                ray_actors.spread(missing, open_job, survey, identity, plan, counts),
                journal,
                counts,
            )

        run.carry_on(counts, journal, id_of(identity), answer, force, request.ui)


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
