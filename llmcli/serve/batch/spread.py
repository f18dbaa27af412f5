"""A batch over several models, through Ray Data: lines go out in blocks, actors answer them, lines
come back.

Each actor holds a model of its own and works through a block as one machine does through a batch
(work.py). The journal stays with who asked; what an actor had not given back when it was lost is
computed again by another one, and the journal takes each line once. A line's seed is its name's, so
that it does not matter who answers it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from llmcli.errors import UserError
from llmcli.serve.batch.job import Job, fingerprint
from llmcli.serve.batch.lines import Line, Survey
from llmcli.serve.batch.work import Work

# lines of a block for each answer at once: the last ones of a block run with fewer beside them
BLOCK = 4
HINT = "a cluster's machines need llmcli, Ray and the model under the same names as this one"
Open = Callable[[], AbstractContextManager[Any]]  # a Job without its identity; travels by name


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is spread: actors, answers at once of each, CPUs that Ray counts for one."""

    actors: int
    parallel: int
    cpus: float = 1.0


@dataclass(slots=True)
class Counts:
    """What the actors have told so far, as Work tells it of itself."""

    tokens: int = 0
    prompted: int = 0
    cached: int = 0
    stopped: bool = False
    tell: Callable[[], None] = lambda: None


class Answerer:
    """One actor: opened once, then called with a block of lines."""

    def __init__(
        self, open_job: Open, survey: Survey, parallel: int, about: Mapping[str, Any]
    ) -> None:
        self._held, self._parallel = ExitStack(), parallel
        runner, rules = self._held.enter_context(open_job())
        mine = fingerprint(runner, rules, survey)
        other = [name for name in mine if mine[name] != about[name]]
        if other:
            raise UserError(f"a machine of the cluster has another {', '.join(other)}", hint=HINT)
        self._job = Job(runner, rules, about)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Columns of lines in; columns of their answers out, in the order in which they ended."""
        columns = (block[name] for name in ("index", "number", "raw", "too_long"))
        lines = [
            Line(int(i), int(n), bytes(raw), int(size))
            for i, n, raw, size in zip(*columns, strict=True)
        ]
        answers: list[tuple[int, bytes]] = []
        job = self._job
        work = Work(
            job.runner,
            self._parallel,
            lambda index, came: answers.append((index, job.line(index, came))),
        )
        work.run(job.tasks(lines))
        counts = [(work.tokens, work.prompted, work.cached), *[(0, 0, 0)] * (len(answers) - 1)]
        return {
            "index": [index for index, _ in answers],
            "line": [line for _, line in answers],
            "tokens": [one[0] for one in counts],
            "prompted": [one[1] for one in counts],
            "cached": [one[2] for one in counts],
        }


def identity(open_job: Open, survey: Survey, cpus: float) -> dict[str, Any]:
    """What the batch is, as a machine of the cluster sees it; raises UserError where the model does
    not open there.
    """

    def look() -> dict[str, Any]:
        with open_job() as (runner, rules):
            return fingerprint(runner, rules, survey)

    try:
        found: dict[str, Any] = ray.get(
            ray.remote(look).options(num_cpus=cpus, max_retries=0).remote()
        )
    except RayError as error:
        raise refused(error) from None
    return found


def spread(
    lines: Iterable[Line],
    open_job: Open,
    survey: Survey,
    about: Mapping[str, Any],
    plan: Plan,
    counts: Counts,
) -> Iterator[tuple[int, bytes]]:
    """The answers to these lines, in the order in which they come; raises UserError where the
    actors do not start.
    """
    items = [
        {"index": one.index, "number": one.number, "raw": one.raw, "too_long": one.too_long}
        for one in lines
    ]
    if not items:
        return
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    size = min(BLOCK * plan.parallel, -(-len(items) // plan.actors))
    blocks = max(1, -(-len(items) // size))
    answered = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        Answerer,
        fn_constructor_args=(open_job, survey, plan.parallel, about),
        batch_size=size,
        num_cpus=plan.cpus,
        compute=ray.data.ActorPoolStrategy(size=plan.actors),
    )
    try:
        for row in answered.iter_rows():
            counts.tokens += row["tokens"]
            counts.prompted += row["prompted"]
            counts.cached += row["cached"]
            yield row["index"], row["line"]
    except RayError as error:
        raise refused(error) from None


def refused(error: RayError) -> UserError:
    """What went wrong on a machine of the cluster, in its own words where it had any."""
    cause = getattr(error, "cause", None)
    return UserError(
        f"the cluster did not answer: {cause or error}", hint=getattr(cause, "hint", "") or HINT
    )
