"""Runs a batch on several models through Ray Data: blocks of lines are sent to actors, which return
the answers.

Each actor has its own model and runs a block as a single machine runs a batch (executor.py). The
journal stays on the caller's machine. If an actor is lost, another one computes its blocks again,
and the journal accepts each line once. The seed of a line is derived from its name, so that every
actor uses the same seed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from llmcli.batch.executor import BatchExecutor
from llmcli.batch.input_lines import InputLine, LineSurvey
from llmcli.batch.job import BatchJob, batch_identity
from llmcli.errors import UserError

# Lines of a block for each answer that an actor computes at once. At the end of a block fewer
# answers run at once, so blocks must not be small.
LINES_PER_ANSWER = 4
CLUSTER_HINT = "every machine of the cluster needs llmcli, Ray and the model under the same names"
# opens the model and yields a runner and rules; pickled by name
OpenJob = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """How a batch is distributed: the number of actors, the number of answers that each actor
    computes at once, and the CPUs that Ray counts for each actor.
    """

    actors: int
    parallel: int
    cpus: float = 1.0


@dataclass(slots=True)
class ClusterCounts:
    """Sums of the counters of all actors, with the same attributes as BatchExecutor."""

    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_stopped: bool = False
    on_progress: Callable[[], None] = lambda: None


class LineActor:
    """One actor: a model that is opened once, and then called with blocks of lines."""

    def __init__(
        self,
        open_job: OpenJob,
        survey: LineSurvey,
        parallel: int,
        expected_identity: Mapping[str, Any],
    ) -> None:
        self._stack, self._parallel = ExitStack(), parallel
        runner, rules = self._stack.enter_context(open_job())
        identity_ = batch_identity(runner, rules, survey)
        differences = [name for name in identity_ if identity_[name] != expected_identity[name]]
        if differences:
            raise UserError(
                f"a machine of the cluster differs in {', '.join(differences)}", hint=CLUSTER_HINT
            )
        self._job = BatchJob(runner, rules, expected_identity)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Answer the lines of a block. The block and the result consist of columns; the answers are
        in the order in which they ended.
        """
        columns = (block[name] for name in ("index", "number", "raw", "too_long"))
        lines = [
            InputLine(int(i), int(n), bytes(raw), int(size))
            for i, n, raw, size in zip(*columns, strict=True)
        ]
        answers: list[tuple[int, bytes]] = []
        job = self._job
        executor = BatchExecutor(
            job.runner,
            self._parallel,
            lambda index, came: answers.append((index, job.output_line(index, came))),
        )
        executor.run(job.make_tasks(lines))
        counts = [
            (executor.tokens, executor.prompt_tokens, executor.cached_tokens),
            *[(0, 0, 0)] * (len(answers) - 1),
        ]
        return {
            "index": [index for index, _ in answers],
            "line": [line for _, line in answers],
            "tokens": [row[0] for row in counts],
            "prompted": [row[1] for row in counts],
            "cached": [row[2] for row in counts],
        }


def read_identity(open_job: OpenJob, survey: LineSurvey, cpus: float) -> dict[str, Any]:
    """Return the identity of the batch as computed on a machine of the cluster. Raises UserError if
    that machine cannot open the model.
    """

    def compute() -> dict[str, Any]:
        with open_job() as (runner, rules):
            return batch_identity(runner, rules, survey)

    try:
        value: dict[str, Any] = ray.get(
            ray.remote(compute).options(num_cpus=cpus, max_retries=0).remote()
        )
    except RayError as error:
        raise cluster_error(error) from None
    return value


def answer_lines(
    lines: Iterable[InputLine],
    open_job: OpenJob,
    survey: LineSurvey,
    expected_identity: Mapping[str, Any],
    plan: ClusterPlan,
    counts: ClusterCounts,
) -> Iterator[tuple[int, bytes]]:
    """Yield the index and the output line of each answer, in the order in which they arrive. Raises
    UserError if the actors do not start.
    """
    items = [
        {"index": line.index, "number": line.number, "raw": line.raw, "too_long": line.too_long}
        for line in lines
    ]
    if not items:
        return
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    size = min(LINES_PER_ANSWER * plan.parallel, -(-len(items) // plan.actors))
    blocks = max(1, -(-len(items) // size))
    answers = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        LineActor,
        fn_constructor_args=(open_job, survey, plan.parallel, expected_identity),
        batch_size=size,
        num_cpus=plan.cpus,
        compute=ray.data.ActorPoolStrategy(size=plan.actors),
    )
    try:
        for row in answers.iter_rows():
            counts.tokens += row["tokens"]
            counts.prompt_tokens += row["prompted"]
            counts.cached_tokens += row["cached"]
            yield row["index"], row["line"]
    except RayError as error:
        raise cluster_error(error) from None


def cluster_error(error: RayError) -> UserError:
    """Return the error for a failure in the cluster. If the failure has a cause on the other
    machine, the cause's message and hint are used.
    """
    cause = getattr(error, "cause", None)
    return UserError(
        f"the cluster did not answer: {cause or error}",
        hint=getattr(cause, "hint", "") or CLUSTER_HINT,
    )
