"""Converts the input lines of a batch to tasks, and the tasks' results to output lines.

Also computes the identity of a batch: everything that its answers depend on. A run resumes an
earlier run only if both have the same identity.
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
from llmcli.runtime.sampling import N_SEEDS, RANDOM_SEED, Sampling, default_sampling
from quant.errors import UserError

# Request fields that force an answer into a format. If a line sets one of them, the batch's
# defaults for all of them are ignored.
FORM_FIELDS = ("response_format", "json_schema", "grammar", "tools")


# sampling settings that the first version did not have
LATER_SETTINGS = frozenset({"dry_sequence_breakers", "top_n_sigma", "infill"})


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The settings with which the lines of a batch are answered.

    - `settings`: the same settings as of a server; a line's request fields have precedence.
    - `seed`: a line without a seed gets one that is derived from this seed and the line's name.
    - `defaults`: request fields that are added to lines that do not set them.
    - `plan`: function that makes the answer plan (plans.py) of a parsed request.
    """

    settings: ServerSettings
    seed: int = 0
    defaults: Mapping[str, Any] | None = None
    plan: Callable[[ApiForm], AnswerPlan] = plain


def batch_identity(runner: Runner, rules: BatchRules, survey: LineSurvey) -> dict[str, Any]:
    """Return the identity of a batch as a JSON object: everything that its answers depend on.

    Thread counts, batch sizes and the number of parallel answers are left out, because they change
    only rounding errors, and --reproducible excludes these.
    """
    model, settings = kv_state_file.state_identity(runner), rules.settings
    return {
        "input": survey.sha256,
        "lines": survey.count,
        "model": model.as_dict() if model else settings.model_name,
        "name": settings.model_name,
        "context": runner.n_ctx,
        "sampling": _sampling_identity(settings.sampling),
        "system": settings.system,
        "stops": list(settings.stops),
        "predict": settings.max_tokens,
        "seed": rules.seed,
        "defaults": dict(rules.defaults or {}),
        "plan": rules.plan.__name__,
        # left out by default, so that batches which an earlier version has begun can be resumed
        **({"endless": True} if settings.allow_repetition else {}),
        **(
            {}
            if settings.reasoning_budget is None
            else {"reasoning_budget": settings.reasoning_budget}
        ),
    }


def _sampling_identity(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling settings of a batch. Settings of LATER_SETTINGS that have their defaults
    are left out, so that batches which an earlier version has begun can be resumed.
    """
    defaults = default_sampling().as_dict()
    return {
        name: value
        for name, value in sampling.as_dict().items()
        if name not in LATER_SETTINGS or value != defaults[name]
    }


class LineOutputs:
    """Converts results to the output lines of one batch. `id`: the batch's id (see batch_id)."""

    def __init__(self, identity: Mapping[str, Any]) -> None:
        self.id = batch_id(identity)
        # Name and line number of each line whose task has not ended, by the index of the line.
        self._lines: dict[int, tuple[str, int]] = {}

    def remember_line(self, line: InputLine, name: str | None = None) -> None:
        """Remember the name of a line for its output line. Call this once for each line, before
        output_line(). `name`: None reads it from the line.
        """
        self._lines[line.index] = read_line_name(line) if name is None else name, line.number

    def output_line(self, index: int, result: Document | UserError) -> bytes:
        """Return the output line, without newline, for the result of the line with this index. May
        be called only once for each index.
        """
        name, number = self._lines.pop(index)
        if isinstance(result, DamagedLine):
            return output_line.damaged_line(self.id, index, name, number, result.code, str(result))
        if isinstance(result, UserError):
            return output_line.error_line(self.id, index, name, as_api_error(result))
        return output_line.answered_line(self.id, index, name, result)


class BatchJob(LineOutputs):
    """Converts the lines of one batch to tasks for the executor, and results to output lines.

    `other_models`: all model names that lines requested and that are not the name of this batch's
    model, which answers these lines nevertheless.
    """

    def __init__(self, runner: Runner, rules: BatchRules, identity: Mapping[str, Any]) -> None:
        super().__init__(identity)
        self.runner, self.rules = runner, rules
        self.other_models: set[str] = set()

    def make_tasks(self, lines: Iterable[InputLine]) -> Iterator[BatchTask]:
        """Yield a task for each line, in order. A line that is not a valid request becomes a task
        with an error.
        """
        return map(self._task, lines)

    def _task(self, line: InputLine) -> BatchTask:
        """Return the task for a line, and remember the line's name for the output line."""
        self.remember_line(line)
        try:
            request = parse_line(line, has_template=self.runner.template is not None)
            if request.url == EMBEDDINGS_PATH:
                return BatchTask(
                    line.index,
                    None,
                    engine_work=self._embed(self.without_other_model(dict(request.body))),
                )
            return BatchTask.begin(line.index, self.rules.plan(self.build_form(request)))
        except UserError as error:
            return BatchTask(line.index, None, error=error)

    def without_other_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Remove `model` from a request body if it is not a name of this batch's model, and add the
        removed name to `other_models`. Return the body, which is changed in place.
        """
        if isinstance(body.get("model"), str) and body["model"] not in self.rules.settings.names:
            self.other_models.add(body.pop("model"))
        return body

    def _embed(self, body: Mapping[str, Any]) -> Iterator[Document | None]:
        """Compute the embeddings that a request body asks for, as BatchTask.engine_work: yield None
        after each pass, and at last the document. Raises ApiError if the request is invalid.
        """
        request, embedder = (
            embeddings.EmbeddingsRequest(body, self.rules.settings),
            self.runner.embedder(),
        )
        length = request.vector_length(embedder)
        embeddings.refuse_token_vectors(embedder)
        ids = embeddings.encode_texts(request.texts, embedder, request.shortening)
        embedding = embedder.start_job(ids, request.norm)
        while embedding.step():
            yield None
        yield request.build_document(ids, embedding.vectors, length)

    def build_form(self, line_request: BatchRequest) -> ApiForm:
        """Return the parsed request of a line, with the batch's defaults and a seed derived from
        the line's name if the line sets none. Raises ApiError if the request is invalid.
        """
        form_class = FORMS.get(line_request.url)
        if form_class is None:
            available = ", ".join(sorted([*FORMS, EMBEDDINGS_PATH]))
            raise ApiError(
                f"the url {line_request.url[:100]!r} is not supported; available: {available}",
                404,
                param="url",
            )
        body, settings = (
            self.without_other_model({**self._defaults(line_request.body), **line_request.body}),
            self.rules.settings,
        )
        if body.pop("stream", None):
            raise streams_refused()
        form: ApiForm = form_class(body, self.runner, settings)
        if any(request.sampling.seed == RANDOM_SEED for request in form.requests):
            seed = line_seed(self.rules.seed, line_request.custom_id)
            form.requests = tuple(
                replace(request, sampling=replace(request.sampling, seed=(seed + number) % N_SEEDS))
                for number, request in enumerate(form.requests)
            )
        return form

    def _defaults(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the default request fields for a body. If the body itself sets any of FORM_FIELDS,
        the defaults for all of these are left out, because an answer can have only one format.
        """
        sets_form = any(name in body for name in FORM_FIELDS)
        return {
            name: value
            for name, value in (self.rules.defaults or {}).items()
            if not (sets_form and name in FORM_FIELDS)
        }


def line_seed(seed: int, name: str) -> int:
    """Return the seed for the line called `name` of a batch with `seed`. It is a hash of both, so
    that it does not depend on the order in which lines are answered.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) % N_SEEDS


def streams_refused() -> ApiError:
    """Return the error for a line that asks for a stream."""
    return ApiError("a batch cannot stream its answers: leave out stream", param="stream")


def batch_id(identity: Mapping[str, Any]) -> str:
    """Return the id of a batch: the SHA-256 of its identity, in hex."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def count_failed(
    batch: str, out: Path, count: int | None, mark: bytes = output_line.ANSWERED_MARK
) -> int | None:
    """Return how many lines of the output file `out` contain an error instead of an answer. Return
    None if `out` is not the complete output of this batch.

    `batch`: the batch's id; `count`: number of its lines, or None for any number but 0; `mark`:
    bytes that only lines with an answer contain. Only the id at the start of each line is checked.
    This is enough, because an output file is always written completely and then renamed.
    """
    failures = n_lines = 0
    try:
        with out.open("rb") as stream:
            while count is None or n_lines < count:
                prefix = b'{"id":"%s"' % output_line.line_id(batch, n_lines).encode()
                start = stream.read(len(prefix))
                if count is None and not start:
                    return failures if n_lines else None
                if start != prefix or not (line := stream.readline()).endswith(b"\n"):
                    return None
                failures += mark not in line
                n_lines += 1
            return None if stream.read(1) else failures
    except OSError:
        return None
