"""ApiForm: the base class of the API forms. A form parses a request in the format of one API, and
writes the response as one JSON document or as a stream of JSON chunks.

This module does not depend on HTTP: the HTTP server, WebSockets, gRPC and batch files all use the
same forms.
"""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar

from llmcli.api.bodies.base import RequestBody
from llmcli.api.bodies.checks import read_body
from llmcli.api.errors import ApiError, error_document
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_resume import StreamPosition
from llmcli.api.stream_telemetry import StreamTelemetry, progress_document, timings_document
from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.requests.request import Answer, Hypothesis, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import N_SEEDS, RANDOM_SEED
from llmcli.types import Event

Document = dict[str, Any]  # a JSON object: a request, a response, or a chunk of a stream
CHOSEN_STRATEGIES = ("beam", "post_sampling")  # those that a request chooses
TEXT_PLACEHOLDER = "\x00text\x00"  # marks where the text goes in a chunk that is encoded in advance


class ApiForm(ABC):
    """One request in the format of one API, and the writer of its response.

    The constructor checks the request's JSON object with the model `body_type` and raises ApiError
    if it is invalid. It sets `requests` (for the engine), `samples_per_request` (the number of
    answers to each request) and `is_stream`. Call compile_constraint() before the requests are
    submitted.

    A complete response is document(). A stream is stream_start(), then stream_event() for every
    event of the engine, then stream_end(). The answers are ordered by request and then by sample;
    `Event.sequence` is an answer's index in this order.
    """

    path: ClassVar[str]
    id_prefix: ClassVar[str]  # prefix of the ids of answers
    media_type: ClassVar[str] = "text/event-stream"
    end_marker: ClassVar[bytes] = b"data: [DONE]\n\n"  # sent at the end of a stream
    ping: ClassVar[bytes] = b": still here\n\n"  # sent when a stream was silent for some seconds
    streams_by_default: ClassVar[bool] = False  # if a request does not say `stream`
    body_type: ClassVar[type[RequestBody]]  # the model of the request
    body: Any  # the request, an object of `body_type`
    supports_beams: ClassVar[bool] = (
        False  # whether the response has a format for the best beams of a search
    )
    requests: tuple[Request, ...]
    samples_per_request: int = 1
    constraint: Constraint | None = None
    # what the constraint demands and is not enforced, each with its place
    not_enforced: tuple[str, ...] = ()

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        """`document`: the request's JSON object, which is stored in `source`. `body` is its model,
        `notes` are sentences for the client about fields without effect, and `log_notes` those for
        the operator, each of which a server logs once.
        """
        self.source, self.runner, self.settings = document, runner, settings
        self.notes: list[str] = []
        self.log_notes: list[str] = []
        body: Any = read_body(self.body_type, document, self.notes, self.path)
        self.body = body
        self.id, self.created = f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time())
        self.has_started = False
        self._json_around_text: dict[int, tuple[bytes, bytes]] = {}
        self.model = settings.find_name(body.model)
        if not runner.can_generate:
            raise ApiError("this is an embedding model and generates no text: use /v1/embeddings")
        self.is_stream = bool(body.stream)
        self._set_verbose(getattr(body, "verbose", None))  # ollama's is among the options
        self.telemetry = StreamTelemetry(body)

    def compile_constraint(self) -> None:
        """Compile the constraint (for example a JSON schema) into a grammar and add the grammar to
        every request. This may take a second. Raises UserError for a constraint that cannot be
        compiled, and ApiError or UserError as check_requests() does.
        """
        if self.constraint is None:
            return
        grammar: Grammar = self.runner.grammars(self.constraint)
        self.not_enforced = grammar.not_enforced
        self.requests = tuple(
            replace(
                request,
                grammar=grammar,
                strategy=request.strategy
                if request.strategy in CHOSEN_STRATEGIES
                else self.runner.default_strategy(grammar),
            )
            for request in self.requests
        )
        if self.is_beam_search:
            grammar.start(is_rigid=True).close()  # compiles it here, not in the engine's thread
        self.check_requests()

    def check_requests(self) -> None:
        """Raise ApiError or UserError if a request cannot be answered: a beam search whose result
        this API has no format for, or a request that the model or its context cannot handle.
        """
        if self.is_beam_search and not self.supports_beams:
            raise ApiError(
                "beams are supported only by /v1/chat/completions and /v1/completions",
                param="beams",
            )
        for request in self.requests:
            self.runner.check_request(request, self.n_samples)

    @property
    def is_beam_search(self) -> bool:
        """Whether the request is a beam search, which has no text to stream before the search
        ends.
        """
        return bool(self.requests) and self.requests[0].strategy == "beam"

    @property
    def n_samples(self) -> int:
        """Number of answers that the engine generates for each request: 1 for a beam search, which
        returns several beams in one answer.
        """
        return 1 if self.is_beam_search else self.samples_per_request

    def resume(self, position: StreamPosition) -> None:
        """Prepare this form to continue a stream that was interrupted at `position`. The form gets
        the id, time and seed of the interrupted response, and its requests replay the tokens that
        the client already has.
        """
        self.id, self.created, n_samples = (
            f"{self.id_prefix}{position.name}",
            position.created,
            self.n_samples,
        )
        self.requests = tuple(
            replace(
                request,
                replays=tuple(
                    position.replayed_answer(first + offset) for offset in range(n_samples)
                )
                if position.tokens
                else (),
                sampling=request.sampling.with_values({"seed": _seed(request, position, first)}),
            )
            for first, request in zip(count(step=n_samples), self.requests, strict=False)
        )

    @abstractmethod
    def document(self, answers: Sequence[Answer]) -> Any:
        """Return the complete response: a JSON object, or a list of them."""

    @abstractmethod
    def stream_start(self) -> Iterable[Document]:
        """Return the stream's chunks before the first event, and set `has_started`."""

    @abstractmethod
    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return the stream's chunks for an event. `event.sequence` is the index of the event's
        answer.
        """

    @abstractmethod
    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Return the stream's last chunks. `answers`: all finished answers."""

    def progress_chunk(self, number: int) -> Document | None:
        """Return the chunk to which the progress of the prompt of an answer is added; None if this
        API has none. `number`: the index of the answer.
        """
        return None

    def event_chunks(self, event: Event) -> list[Document]:
        """Return the stream's chunks for an event, with the progress of the prompt and the timings
        so far if the request asks for them.
        """
        telemetry = self.telemetry
        if not telemetry.is_on:
            return list(self.stream_event(event))
        request = self.requests[event.sequence // self.n_samples]
        telemetry.record(event, request.thinking)
        chunks = list(self.stream_event(event))
        if event.progress and telemetry.has_progress:
            chunk = self.progress_chunk(event.sequence)
            if chunk is not None:
                chunks.append({**chunk, "prompt_progress": progress_document(event.progress)})
        telemetry.add_timings(event.sequence, chunks)
        return chunks

    def complete_document(self, answers: Sequence[Answer]) -> Any:
        """Return the complete response, with its metadata: the field `constraint` where something
        that the constraint demands is not enforced, and `notes` about fields without effect.
        """
        document = self.document(answers)
        for inner in document if isinstance(document, list) else [document]:
            self._add_metadata(inner)
        return document

    def final_chunks(self, answers: Sequence[Answer]) -> list[Document]:
        """Return the stream's last chunks, with the metadata of complete_document() in the very
        last one.
        """
        chunks = list(self.stream_end(answers))
        if chunks:
            last = chunks[-1]
            response = last.get("response")  # of the event response.completed
            self._add_metadata(response if isinstance(response, dict) else last)
            if self.telemetry.has_timings:
                last["timings"] = answer_timings(answers[0])
        return chunks

    def _add_metadata(self, document: Document) -> None:
        """Add the fields `constraint` and `notes` to a response, if there is something to say in
        them, and the prompts if the request asks for them.
        """
        if self.is_verbose:
            texts = [self.prompt_text(request) for request in self.requests]
            document["__verbose"] = {"prompt": texts[0] if len(texts) == 1 else texts}
        if self.not_enforced:
            document["constraint"] = {"not_enforced": list(self.not_enforced)}
        if self.notes:
            document["notes"] = list(self.notes)

    def _set_verbose(self, requested: bool | None) -> None:
        """Set whether the answer has the text of its prompt. `requested`: the request's field; None:
        it has none, and the server's setting counts.
        """
        self.is_verbose = self.settings.shows_prompts if requested is None else requested

    def prompt_text(self, request: Request) -> str:
        """Return the text of a prompt, with its control tokens."""
        model = self.runner.model
        pieces = [model.piece(token, special=True) for token in request.tokens]
        return b"".join(pieces).decode("utf-8", "replace")

    def encode_event(self, event: Event) -> bytes:
        """Return the chunks for an event, encoded as in encode_chunks()."""
        return self.encode_chunks(self.event_chunks(event))

    def encode_text_event(self, index: int, text: str, chunk: Callable[[str], Document]) -> bytes:
        """Return the Server-Sent Event of a chunk that differs from the previous one only in its
        text. The JSON around the text is encoded once for each answer, because encoding it for
        every token would be several times slower.

        `index`: the index of the answer. `chunk`: builds the whole chunk from a text.
        """
        if index not in self._json_around_text:
            before, after = encode_json(chunk(TEXT_PLACEHOLDER)).split(
                encode_json(TEXT_PLACEHOLDER)
            )
            self._json_around_text[index] = b"data: " + before, after + b"\n\n"
        before, after = self._json_around_text[index]
        return before + encode_json(text) + after

    def encode_chunks(self, chunks: Iterable[Document]) -> bytes:
        """Encode chunks as Server-Sent Events."""
        return b"".join(b"data: " + encode_json(chunk) + b"\n\n" for chunk in chunks)

    @classmethod
    def encode_error(cls, error: ApiError) -> bytes:
        """Encode an error as the event that ends a failed stream."""
        return b"data: " + encode_json(error_document(error, cls.path)) + b"\n\n"


def _seed(request: Request, position: StreamPosition, number: int) -> int:
    """Return the sampling seed of a resumed request: the seed that the client set, or else a seed
    derived from the position's seed and `number`, the index of the request's first answer. So two
    requests with equal prompts and no seed still get different seeds.
    """
    seed: int = request.sampling["seed"]
    return (position.seed + number) % N_SEEDS if seed == RANDOM_SEED else seed


def encode_named_events(chunks: Iterable[Document]) -> bytes:
    """Encode chunks as Server-Sent Events with an `event:` line, which names the chunk's `type`."""
    return b"".join(
        b"event: " + chunk["type"].encode() + b"\ndata: " + encode_json(chunk) + b"\n\n"
        for chunk in chunks
    )


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8, without spaces. Unpaired surrogate code points, which can
    only be in a text of the client, become question marks.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def token_usage(answers: Sequence[Answer], samples: int = 1) -> Document:
    """Return OpenAI's `usage` object. `samples`: the number of answers to each prompt; the tokens
    of a prompt are counted once, not once for each answer.
    """
    prompt = sum(answer.prompt_tokens for answer in answers[::samples])
    completion = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.cached_tokens for answer in answers[::samples]),
            **disk_counts(answers[::samples]),
        },
    }


def disk_counts(answers: Sequence[Answer]) -> Document:
    """Return the field `disk_tokens`: how many of the cached tokens of the prompts were read from
    the prefix cache on disk. Return no field if none was.
    """
    count = sum(answer.disk_tokens for answer in answers)
    return {"disk_tokens": count} if count else {}


def answer_timings(answer: Answer) -> Document:
    """Return llama-server's `timings` object for an answer."""
    timings = timings_document(
        answer.prompt_tokens,
        answer.cached_tokens,
        answer.prompt_ms,
        len(answer.tokens),
        answer.generate_ms,
        answer.ttft_ms,
        answer.ttfo_ms,
    )
    if answer.n_drafted is not None:
        timings |= {"draft_n": answer.n_drafted, "draft_n_accepted": answer.n_accepted}
    return timings


def best_beams(answer: Answer, count: int) -> Sequence[Hypothesis]:
    """Return the `count` best hypotheses of a beam search, best first; fewer if a grammar allowed
    fewer. If the answer has no hypotheses, return its text as the only one.
    """
    return answer.beams[:count] or (Hypothesis(answer.text, 0.0, ()),)


def find_stop_sequence(runner: Runner, request: Request, answer: Answer) -> str | None:
    """Return the stop sequence that ended an answer, or None if none did. The answer's text lacks
    the stop sequence, so it is looked for in the text of the generated tokens.
    """
    if not request.stops or answer.finish != "stop":
        return None
    generated = b"".join(runner.model.piece(token.id) for token in answer.tokens).decode(
        "utf-8", "replace"
    )
    return next(
        (stop for stop in request.stops if stop in generated and stop not in answer.text), None
    )


def finish_reason(answer: Answer) -> str:
    """Return OpenAI's finish reason: "stop" or "length"."""
    return "stop" if answer.finish == "stop" else "length"
