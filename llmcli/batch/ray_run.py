"""`llmcli batch --ray`: copies of the model on a Ray cluster answer the lines. The journal and the
output file are on this machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from llmcli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.batch.input_lines import BatchInput, LineSurvey
    from llmcli.batch.job import BatchRules
    from llmcli.batch.journal import BatchJournal
    from llmcli.batch.ray_actors import ClusterCounts
    from llmcli.batch.run import BatchResult
    from llmcli.config import Config
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.runner import Runner
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """The Ray cluster to use. `replicas`: number of copies of the model on it; 0 means one for each
    machine.
    """

    address: str
    replicas: int


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """Everything that a machine of the cluster needs to open the model. Ray pickles it.

    `ref`: the model as on the command line. `slots`: number of sequences that the context can hold;
    `parallel`: number of answers that run at the same time; `skeleton`: whether to answer by
    Skeleton-of-Thought.
    """

    ref: str
    run_flags: "RunFlags"
    config: "Config"
    ui: "UI"
    slots: int
    parallel: int
    skeleton: bool


@contextmanager
def open_model(request: ClusterRequest) -> "Iterator[tuple[Runner, BatchRules]]":
    """Open the model on this machine. Yield its runner and the settings for answering lines."""
    from llmcli.batch.run import build_rules, without_line_options
    from llmcli.model_loader import open_server_model

    with open_server_model.open_server_model(
        request.ref,
        without_line_options(request.run_flags),
        request.config,
        request.ui,
        request.slots,
        max_gap_seconds=None,
    ) as hosted:
        yield hosted.runner, build_rules(hosted, request.run_flags, request.skeleton)


def run_on_cluster(
    request: ClusterRequest,
    target: ClusterTarget,
    source: "BatchInput",
    survey: "LineSurvey",
    out: "Path",
    force: bool,
) -> "BatchResult":
    """Answer the lines on the cluster and write the output file `out`. `force`: discard the journal
    of an earlier run.

    Raises UserError if the cluster, the model or the journal cannot be used.
    """
    from llmcli.batch import run
    from llmcli.batch.job import batch_id
    from llmcli.batch.journal import BatchJournal
    from llmcli.hardware import ray_cluster
    from llmcli.model_loader import run_flags

    if request.run_flags.placement.rpc:
        raise UsageError(
            "an RPC worker serves one client, not several models", hint="leave out --ray or --rpc"
        )
    local = target.address == ray_cluster.LOCAL_RAY
    ray_cluster.require_ray(local)
    from llmcli.batch import ray_actors
    from llmcli.hardware.ray_cluster import open_cluster

    n_replicas = target.replicas or 1
    if local:
        request = replace(request, run_flags=run_flags.split_threads(request.run_flags, n_replicas))
    open_job, counts = partial(open_model, request), ray_actors.ClusterCounts()
    with open_cluster(
        None if local else target.address, n_replicas + 1
    ) as machines:  # Ray Data itself needs one CPU
        identity = ray_actors.read_identity(open_job, survey, 1.0)
        journal, plan = (
            BatchJournal(out, identity, survey.count),
            ray_actors.ClusterPlan(target.replicas or machines, request.parallel),
        )

        def answer_missing() -> None:
            missing = (line for line in source.lines() if not journal.has(line.index))
            _store_answers(
                ray_actors.answer_lines(missing, open_job, survey, identity, plan, counts),
                journal,
                counts,
            )

        return run.run_or_resume(
            counts,
            journal,
            run.answers_output(batch_id(identity), out, survey.count),
            answer_missing,
            force,
            request.ui,
            is_reproducible=request.run_flags.options.reproducible,
        )


def _store_answers(
    answers: "Iterator[tuple[int, bytes]]", journal: "BatchJournal", counts: "ClusterCounts"
) -> None:
    """Append each arriving output line to the journal, except lines that are already in it. On
    Ctrl-C, set `counts.is_stopped` and return.
    """
    try:
        for index, line in answers:
            if not journal.has(index):  # if an actor is lost, another one sends its lines again
                journal.append(index, line)
            counts.on_progress()
    except KeyboardInterrupt:
        counts.is_stopped = True


def parse_target(address: str | None, replicas: int) -> ClusterTarget | None:
    """Return the cluster that --ray (`address`) and --replicas select, or None if --ray is not set.
    Raises UsageError if --replicas is set without --ray.
    """
    if address is None:
        if replicas:
            raise UsageError(
                "--replicas needs a Ray cluster",
                hint="add --ray ADDRESS (local: on this machine)",
            )
        return None
    return ClusterTarget(address, replicas)
