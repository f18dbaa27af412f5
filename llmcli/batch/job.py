"""A batch: converts input lines to tasks and results to output lines. The identity of the batch
allows an interrupted run to resume.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcli.api import embeddings
from llmcli.api.errors import ApiError, as_api_error
from llmcli.api.forms import FORMS
from llmcli.api.forms.base import ApiForm, Document
from llmcli.api.server_settings import ServerSettings
from llmcli.batch import output_line
from llmcli.batch.executor import BatchTask
from llmcli.batch.input_lines import InputLine, LineSurvey
from llmcli.batch.plans import AnswerPlan, plain
from llmcli.batch.request_line import (
    EMBEDDINGS_PATH,
    BatchRequest,
    DamagedLine,
    parse_line,
    read_line_name,
)
from llmcli.runtime import kv_state_file
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import N_SEEDS, RANDOM_SEED
from quant.errors import UserError

# Request fields that set the format of an answer.
FORM_FIELDS = ("response_format", "json_schema", "grammar", "tools")


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The rules by which the lines of a batch are answered.

    `settings`: server settings that apply where a line sets nothing; `seed`: the seed from which
    the seeds of lines without one are derived; `defaults`: request fields for lines that do not set
    them; `plan`: function that makes the answer plan of a form.
    """

    settings: ServerSettings
    seed: int = 0
    defaults: Mapping[str, Any] | None = None
    plan: Callable[[ApiForm], AnswerPlan] = plain


def batch_identity(runner: Runner, rules: BatchRules, survey: LineSurvey) -> dict[str, Any]:
    """Return the identity of a batch: everything that its answers depend on. Thread counts, batch
    sizes and the number of answers at once are not included, because they only change how llama.cpp
    rounds, which --reproducible prevents.
    """
    model, settings = kv_state_file.state_identity(runner), rules.settings
    return {
        "input": survey.sha256,
        "lines": survey.count,
        "model": model.as_dict() if model else settings.model_name,
        "name": settings.model_name,
        "context": runner.n_ctx,
        "sampling": settings.sampling.as_dict(),
        "system": settings.system,
        "stops": list(settings.stops),
        "predict": settings.max_tokens,
        "seed": rules.seed,
        "defaults": dict(rules.defaults or {}),
        "plan": rules.plan.__name__,
    }


class BatchJob:
    """One batch. It converts lines to tasks, and their results to lines of the journal.

    `other_models`: names of other models that lines have requested. This batch's model answers
    these lines, too.
    """

    def __init__(self, runner: Runner, rules: BatchRules, identity: Mapping[str, Any]) -> None:
        self.runner, self.rules = runner, rules
        self.id = batch_id(identity)
        self.other_models: set[str] = set()
        # By index: name and number of each line whose task has not ended.
        self._lines: dict[int, tuple[str, int]] = {}

    def make_tasks(self, lines: Iterable[InputLine]) -> Iterator[BatchTask]:
        """Yield a task for each line."""
        return map(self._task, lines)

    def _task(self, line: InputLine) -> BatchTask:
        self._lines[line.index] = read_line_name(line), line.number
        try:
            request = parse_line(line, has_template=self.runner.template is not None)
            if request.url == EMBEDDINGS_PATH:
                return BatchTask(
                    line.index,
                    None,
                    engine_work=self._embed(self._without_other_model(dict(request.body))),
                )
            return BatchTask.begin(line.index, self.rules.plan(self._build_form(request)))
        except UserError as error:
            return BatchTask(line.index, None, error=error)

    def output_line(self, index: int, result: Document | UserError) -> bytes:
        """Return the output line of a task that has ended."""
        name, number = self._lines.pop(index)
        if isinstance(result, DamagedLine):
            return output_line.damaged_line(self.id, index, name, number, result.code, str(result))
        if isinstance(result, UserError):
            return output_line.error_line(self.id, index, name, as_api_error(result))
        return output_line.answered_line(self.id, index, name, result)

    def _without_other_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request body without its `model` if that is the name of another model."""
        if isinstance(body.get("model"), str) and body["model"] not in self.rules.settings.names:
            self.other_models.add(body.pop("model"))
        return body

    def _embed(self, body: Mapping[str, Any]) -> Iterator[Document | None]:
        """Compute the embeddings for a request body. Yield None after each pass except the last,
        then the embeddings document. Runs on the engine's thread.
        """
        request, embedder = (
            embeddings.EmbeddingsRequest(body, self.rules.settings),
            self.runner.embedder(),
        )
        length = request.vector_length(embedder)
        ids = embeddings.encode_texts(request.texts, embedder)
        embedding = embedder.start_job(ids)
        while embedding.step():
            yield None
        yield request.build_document(ids, embedding.vectors, length)

    def _build_form(self, wants: BatchRequest) -> ApiForm:
        make = FORMS.get(wants.url)
        if make is None:
            available = ", ".join(sorted([*FORMS, EMBEDDINGS_PATH]))
            raise ApiError(
                f"the url {wants.url[:100]!r} is not supported; available: {available}",
                404,
                param="url",
            )
        body, settings = (
            self._without_other_model({**self._defaults(wants.body), **wants.body}),
            self.rules.settings,
        )
        if body.pop("stream", None):
            raise ApiError("a batch cannot stream its answers: leave out stream", param="stream")
        form: ApiForm = make(body, self.runner, settings)
        if any(request.sampling.seed == RANDOM_SEED for request in form.requests):
            seed = self._seed(wants.custom_id)
            form.requests = tuple(
                replace(request, sampling=replace(request.sampling, seed=(seed + number) % N_SEEDS))
                for number, request in enumerate(form.requests)
            )
        return form

    def _defaults(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the default fields that apply to a request body. If the body sets the format of
        the answer, default fields about the format do not apply.
        """
        sets_form = any(name in body for name in FORM_FIELDS)
        return {
            name: value
            for name, value in (self.rules.defaults or {}).items()
            if not (sets_form and name in FORM_FIELDS)
        }

    def _seed(self, name: str) -> int:
        """Return the seed of a line that sets no seed. It depends on the line's name, not on the
        order in which lines are answered.
        """
        return (
            int.from_bytes(hashlib.sha256(f"{self.rules.seed}:{name}".encode()).digest()[:8])
            % N_SEEDS
        )


def batch_id(identity: Mapping[str, Any]) -> str:
    """Return the id of the batch with this identity. Another input, model or setting gives another
    id.
    """
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def count_failed(batch: str, out: Path, count: int) -> int | None:
    """Return the number of lines in the file `out` that contain no answer. Return None if the file
    is not the complete output of this batch.

    The file is complete if every line has the id that this batch gives it. The output file is only
    written as a whole, so this check is enough.
    """
    failures = 0
    try:
        with out.open("rb") as stream:
            for index in range(count):
                prefix = b'{"id":"%s"' % output_line.line_id(batch, index).encode()
                if stream.read(len(prefix)) != prefix or not (line := stream.readline()).endswith(
                    b"\n"
                ):
                    return None
                failures += output_line.ANSWERED_MARK not in line
            return None if stream.read(1) else failures
    except OSError:
        return None
