"""A batch: lines in, answers out, and what it is that must be the same for a killed run to go on."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcli.runtime import identity
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import RANDOM, SEEDS
from llmcli.serve.batch import written
from llmcli.serve.batch.asked import VECTORS, Asked, Damaged, asked, named
from llmcli.serve.batch.lines import Line, Survey
from llmcli.serve.batch.plans import Plan, plain
from llmcli.serve.batch.work import Task
from llmcli.serve.problems import Problem, problem
from llmcli.serve.registry import forms
from llmcli.serve.routes import embeddings
from llmcli.serve.schema.base import Document, Form
from llmcli.serve.settings import Settings
from quant.errors import Refusal

FORMS = (
    "response_format",
    "json_schema",
    "grammar",
    "tools",
)  # fields that say what an answer must look like


@dataclass(frozen=True, slots=True)
class Rules:
    """How lines are answered. `settings` hold where a line says nothing; `seed` is what the seeds
    of lines without one are made from; `defaults` are fields of a body that has none of its own.
    `plan` makes a form a plan.
    """

    settings: Settings
    seed: int = 0
    defaults: Mapping[str, Any] | None = None
    plan: Callable[[Form], Plan] = plain


def fingerprint(runner: Runner, rules: Rules, survey: Survey) -> dict[str, Any]:
    """What the answers depend on. Threads, batch sizes and how many run at once are not among it:
    what they change is how llama.cpp rounds, and --reproducible is for that.
    """
    world, settings = identity.world(runner), rules.settings
    return {
        "input": survey.sha256,
        "lines": survey.count,
        "model": world.as_dict() if world else settings.name,
        "name": settings.name,
        "context": runner.n_ctx,
        "sampling": settings.sampling.as_dict(),
        "system": settings.system,
        "stops": list(settings.stops),
        "predict": settings.max_tokens,
        "seed": rules.seed,
        "defaults": dict(rules.defaults or {}),
        "plan": rules.plan.__name__,
    }


class Job:
    """One batch: makes lines into tasks, and what comes of them into lines of the journal.

    `renamed` are other models that lines have named; this one answers them.
    """

    def __init__(self, runner: Runner, rules: Rules, identity: Mapping[str, Any]) -> None:
        self.runner, self.rules = runner, rules
        self.id = id_of(identity)
        self.renamed: set[str] = set()
        self._lines: dict[
            int, tuple[str, int]
        ] = {}  # of tasks that have not ended: name and number

    def tasks(self, lines: Iterable[Line]) -> Iterator[Task]:
        """A task for each line."""
        return map(self._task, lines)

    def _task(self, line: Line) -> Task:
        self._lines[line.index] = named(line), line.number
        try:
            wants = asked(line, templated=self.runner.template is not None)
            if wants.url == VECTORS:
                return Task(line.index, None, aside=self._embedded(self._named(dict(wants.body))))
            return Task.begin(line.index, self.rules.plan(self._form(wants)))
        except Refusal as error:
            return Task(line.index, None, refusal=error)

    def line(self, index: int, came: Document | Refusal) -> bytes:
        """The line of OUT for a task that has ended."""
        name, number = self._lines.pop(index)
        if isinstance(came, Damaged):
            return written.damaged(self.id, index, name, number, came.code, str(came))
        if isinstance(came, Refusal):
            return written.refused(self.id, index, name, problem(came))
        return written.answered(self.id, index, name, came)

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        """A body without another model's name."""
        if isinstance(body.get("model"), str) and body["model"] not in self.rules.settings.names:
            self.renamed.add(body.pop("model"))
        return body

    def _embedded(self, body: Mapping[str, Any]) -> Iterator[Document | None]:
        """Vectors of texts, on the engine's thread: None behind each pass but the last, then the
        document.
        """
        request, embedder = embeddings.Asked(body, self.rules.settings), self.runner.embedder()
        cut = request.length(embedder)
        ids = embeddings.encoded(request.texts, embedder)
        work = embedder.work(ids)
        while work.step():
            yield None
        yield request.answer(ids, work.vectors, cut)

    def _form(self, wants: Asked) -> Form:
        make = forms().get(wants.url)
        if make is None:
            known = ", ".join(sorted([*forms(), VECTORS]))
            raise Problem(
                f"nothing here answers {wants.url[:100]!r}; there is {known}", 404, param="url"
            )
        body, settings = (
            self._named({**self._defaults(wants.body), **wants.body}),
            self.rules.settings,
        )
        if body.pop("stream", None):
            raise Problem("a batch answers whole: leave out stream", param="stream")
        form: Form = make(body, self.runner, settings)
        if any(request.sampling.seed == RANDOM for request in form.requests):
            seed = self._seed(wants.custom_id)
            form.requests = tuple(
                replace(request, sampling=replace(request.sampling, seed=(seed + number) % SEEDS))
                for number, request in enumerate(form.requests)
            )
        return form

    def _defaults(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the line does not say; of its form nothing where it says that otherwise."""
        formed = any(name in body for name in FORMS)
        return {
            name: value
            for name, value in (self.rules.defaults or {}).items()
            if not (formed and name in FORMS)
        }

    def _seed(self, name: str) -> int:
        """The seed of a line that has none: the same in whatever order lines are answered."""
        return (
            int.from_bytes(hashlib.sha256(f"{self.rules.seed}:{name}".encode()).digest()[:8])
            % SEEDS
        )


def id_of(identity: Mapping[str, Any]) -> str:
    """A batch's id: another input, model or setting has another one."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def failed(batch: str, out: Path, count: int) -> int | None:
    """How many lines of OUT have no answer; None where it is not what the batch of this id comes
    to.

    All its lines bear the ids that they would get, and OUT is only ever put there whole.
    """
    found = 0
    try:
        with out.open("rb") as stream:
            for index in range(count):
                begin = b'{"id":"%s"' % written.line_id(batch, index).encode()
                if stream.read(len(begin)) != begin or not (rest := stream.readline()).endswith(
                    b"\n"
                ):
                    return None
                found += written.ANSWERED not in rest
            return None if stream.read(1) else found
    except OSError:
        return None
