"""Runs a batch on several copies of a model through Ray Data: blocks of input lines are sent to
actors, which return output lines.

Each actor opens the model once and runs a block of lines as a single machine runs a batch
(executor.py). The journal stays on the caller's machine. If an actor is lost, another actor
computes its blocks again, and the journal ignores lines that it already has. The seed of a line is
derived from the line's name, so that it does not depend on the actor.
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

# Lines of a block per answer that an actor computes in parallel. The last answers of a block run
# with fewer others beside them, which is slow, so blocks must not be small.
LINES_PER_ANSWER = 4
CLUSTER_HINT = "every machine of the cluster needs llmcli, Ray and the model under the same names"
# Opens the model and yields a Runner and BatchRules. Ray pickles the function by name.
OpenJob = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """How a batch is distributed. `actors`: number of copies of the model; `parallel`: number of
    answers that each actor computes in parallel; `cpus`: number of CPUs that Ray reserves for each
    actor.
    """

    actors: int
    parallel: int
    cpus: float = 1.0


class ClusterCounts:
    """Sums of the token counters of all actors. Has the counter attributes of BatchExecutor, so
    that the progress display can read both.
    """

    def __init__(self) -> None:
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.is_stopped = False
        self.on_progress: Callable[[], None] = lambda: None


class LineActor:
    """A Ray actor that opens the model and is then called with one block of lines after another.

    Raises UserError if the batch has another identity on this machine than `expected_identity`, for
    example because the model file differs.
    """

    def __init__(
        self,
        open_job: OpenJob,
        survey: LineSurvey,
        parallel: int,
        expected_identity: Mapping[str, Any],
    ) -> None:
        self._stack, self._parallel = ExitStack(), parallel
        runner, rules = self._stack.enter_context(open_job())
        identity = batch_identity(runner, rules, survey)
        differences = [name for name in identity if identity[name] != expected_identity[name]]
        if differences:
            raise UserError(
                f"a machine of the cluster differs in {', '.join(differences)}", hint=CLUSTER_HINT
            )
        self._job = BatchJob(runner, rules, expected_identity)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Answer the lines of a block. Ray Data passes and expects tables as a dict of columns.

        The block has the fields of InputLine as columns. The result has one row for each answer, in
        the order in which the answers ended: `index`, `line` (the output line) and token counts.
        The counts of the complete block are in the first row; the other rows have 0.
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
            lambda index, result: answers.append((index, job.output_line(index, result))),
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
    """Return the identity of the batch (job.batch_identity), computed on a machine of the cluster
    that opens the model for this. `cpus`: number of CPUs that Ray reserves meanwhile.

    Raises UserError if the machine cannot open the model.
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
    """Answer the lines on the cluster. Yield the index and the output line of each answer in the
    order in which they arrive, and add the actors' token counts to `counts`.

    Raises UserError if the actors cannot start or the cluster fails.
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
    """Convert an error of Ray to a UserError. If an exception on a machine of the cluster caused
    it, the returned error has that exception's message and hint.
    """
    cause = getattr(error, "cause", None)
    return UserError(
        f"the cluster did not answer: {cause or error}",
        hint=getattr(cause, "hint", "") or CLUSTER_HINT,
    )
