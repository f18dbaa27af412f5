"""Runs a batch on several models through Ray Data: blocks of lines go to actors, answers come back.

Each actor has its own model and runs a block as one machine runs a batch (executor.py). The journal
stays with the caller. Blocks of a lost actor are computed again by another one, and the journal
accepts each line once. The seed of a line derives from its name, so that it does not matter which
actor answers it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from llmcli.batch.executor import Work
from llmcli.batch.input_lines import Line, Survey
from llmcli.batch.job import Job, fingerprint
from llmcli.errors import UserError

# Lines of a block for each answer at once; the last lines of a block run with fewer beside them.
BLOCK = 4
HINT = "every machine of the cluster needs llmcli, Ray and the model under the same names"
# returns a BatchJob without its identity; pickled by name
Open = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is distributed: number of actors, answers at once of each, and CPUs that Ray
    counts for an actor.
    """

    actors: int
    parallel: int
    cpus: float = 1.0


@dataclass(slots=True)
class Counts:
    """Counters of all actors, with the attributes that BatchExecutor has."""

    tokens: int = 0
    prompted: int = 0
    cached: int = 0
    stopped: bool = False
    tell: Callable[[], None] = lambda: None


class Answerer:
    """One actor: opened once, then called with blocks of lines."""

    def __init__(
        self, open_job: Open, survey: Survey, parallel: int, about: Mapping[str, Any]
    ) -> None:
        self._stack, self._parallel = ExitStack(), parallel
        runner, rules = self._stack.enter_context(open_job())
        identity_ = fingerprint(runner, rules, survey)
        differences = [name for name in identity_ if identity_[name] != about[name]]
        if differences:
            raise UserError(
                f"a machine of the cluster differs in {', '.join(differences)}", hint=HINT
            )
        self._job = Job(runner, rules, about)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Answer the lines in the columns of a block; return columns of answers in the order in
        which they ended.
        """
        columns = (block[name] for name in ("index", "number", "raw", "too_long"))
        lines = [
            Line(int(i), int(n), bytes(raw), int(size))
            for i, n, raw, size in zip(*columns, strict=True)
        ]
        answers: list[tuple[int, bytes]] = []
        job = self._job
        executor = Work(
            job.runner,
            self._parallel,
            lambda index, came: answers.append((index, job.line(index, came))),
        )
        executor.run(job.tasks(lines))
        counts = [
            (executor.tokens, executor.prompted, executor.cached),
            *[(0, 0, 0)] * (len(answers) - 1),
        ]
        return {
            "index": [index for index, _ in answers],
            "line": [line for _, line in answers],
            "tokens": [row[0] for row in counts],
            "prompted": [row[1] for row in counts],
            "cached": [row[2] for row in counts],
        }


def identity(open_job: Open, survey: Survey, cpus: float) -> dict[str, Any]:
    """Return the batch's identity as a machine of the cluster computes it. Raises UserError if the
    model cannot be opened there.
    """

    def compute() -> dict[str, Any]:
        with open_job() as (runner, rules):
            return fingerprint(runner, rules, survey)

    try:
        value: dict[str, Any] = ray.get(
            ray.remote(compute).options(num_cpus=cpus, max_retries=0).remote()
        )
    except RayError as error:
        raise refused(error) from None
    return value


def spread(
    lines: Iterable[Line],
    open_job: Open,
    survey: Survey,
    about: Mapping[str, Any],
    plan: Plan,
    counts: Counts,
) -> Iterator[tuple[int, bytes]]:
    """Yield the answers to these lines in the order in which they arrive. Raises UserError if the
    actors do not start.
    """
    items = [
        {"index": line.index, "number": line.number, "raw": line.raw, "too_long": line.too_long}
        for line in lines
    ]
    if not items:
        return
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    size = min(BLOCK * plan.parallel, -(-len(items) // plan.actors))
    blocks = max(1, -(-len(items) // size))
    answers = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        Answerer,
        fn_constructor_args=(open_job, survey, plan.parallel, about),
        batch_size=size,
        num_cpus=plan.cpus,
        compute=ray.data.ActorPoolStrategy(size=plan.actors),
    )
    try:
        for row in answers.iter_rows():
            counts.tokens += row["tokens"]
            counts.prompted += row["prompted"]
            counts.cached += row["cached"]
            yield row["index"], row["line"]
    except RayError as error:
        raise refused(error) from None


def refused(error: RayError) -> UserError:
    """Return the error of a machine of the cluster, in its own words if it has any."""
    cause = getattr(error, "cause", None)
    return UserError(
        f"the cluster did not answer: {cause or error}", hint=getattr(cause, "hint", "") or HINT
    )
