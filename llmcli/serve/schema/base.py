"""What a form is: one API's way to ask for an answer, and to write that answer whole or in chunks.

Free of HTTP: the server, the WebSocket, gRPC and batch files all read and write through the same
forms.
"""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar

from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.request import Answer, Hypothesis, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import RANDOM, SEEDS
from llmcli.serve.known import Known
from llmcli.serve.problems import Problem, document, unknown_model
from llmcli.serve.schema.fields import Fields
from llmcli.serve.schema.unknown import UNKNOWN
from llmcli.serve.settings import Settings
from llmcli.types import Event

Document = dict[str, Any]
HOLE = "\x00text\x00"  # where a chunk's text stands


class Form(ABC):
    """One request. It is made from the request's JSON (raises Problem), holds what to ask the
    engine, and writes the answers.

    Making it sets `requests`, the `samples` of each, and `stream`. Call ready() before the engine
    is asked. A stream is begin(), show() for every event, end(). Events and answers are numbered as
    the bridge numbers them.
    """

    path: ClassVar[str]
    prefix: ClassVar[str]  # of ids
    media_type: ClassVar[str] = "text/event-stream"
    last: ClassVar[bytes] = b"data: [DONE]\n\n"
    ping: ClassVar[bytes] = (
        b": still here\n\n"  # of a stream that has had nothing to say for a while
    )
    refused: ClassVar[
        dict[str, str]
    ] = {}  # fields that would change the answer and are not known -> what there is
    searches: ClassVar[bool] = False  # whether it has a place for all that a beam search finds
    requests: tuple[Request, ...]
    samples: int = 1
    constraint: Constraint | None = None

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        self.fields, self.runner, self.settings = Fields(body), runner, settings
        self.id, self.created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())
        self.begun = False
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self.model = self.fields.text("model") or settings.name
        if self.model not in settings.names:
            raise unknown_model(self.model, settings.names)
        for name, instead in {**UNKNOWN, **self.refused}.items():
            if self.fields.values.get(name) not in (None, [], {}, "", False, -1):
                raise Problem(f"{name} is not known here: {instead}", param=name)
        if not runner.generates:
            raise Problem(
                "this model was made for embeddings and writes no text: /v1/embeddings answers with it"
            )
        self.stream = self.fields.flag("stream")

    def ready(self) -> None:
        """Compile the grammar, which may take a second. Raises UserError for one that cannot be
        followed.
        """
        if self.constraint is None:
            return
        grammar: Grammar = self.runner.grammars(self.constraint)
        self.requests = tuple(
            replace(
                one,
                grammar=grammar,
                strategy="beam" if self.searched else self.runner.strategy(grammar),
            )
            for one in self.requests
        )
        self.check()

    def check(self) -> None:
        """Raise Problem and UserError for requests that this form, this model and its context
        cannot answer.
        """
        if self.searched and not self.searches:
            raise Problem("beams are for /v1/chat/completions and /v1/completions", param="beams")
        for one in self.requests:
            self.runner.check(one, self.each)

    @property
    def searched(self) -> bool:
        """Whether it is a beam search: nothing of it is told before its end."""
        return bool(self.requests) and self.requests[0].strategy == "beam"

    @property
    def each(self) -> int:
        """How many samples the engine makes of each request; of a beam search it makes one."""
        return 1 if self.searched else self.samples

    def resume(self, known: Known) -> None:
        """Be the answer of which so much is known."""
        self.id, self.created, each = f"{self.prefix}{known.name}", known.created, self.each
        self.requests = tuple(
            replace(
                one,
                known=tuple(known.begun(first + more) for more in range(each))
                if known.tokens
                else (),
                sampling=one.sampling.with_values({"seed": _seed(one, known, first)}),
            )
            for first, one in zip(count(step=each), self.requests, strict=False)
        )

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> Any:
        """The answer as one document, or as a list of them."""

    @abstractmethod
    def begin(self) -> Iterable[Document]:
        """The first chunks of a stream; sets `begun`."""

    @abstractmethod
    def show(self, event: Event) -> Iterable[Document]:
        """The chunks for an event; its `sequence` is the number of the answer."""

    @abstractmethod
    def end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """The last chunks of a stream."""

    def streamed(self, event: Event) -> bytes:
        """show(), as Server-Sent Events."""
        return self.written(self.show(event))

    def framed(self, index: int, text: str, chunk: Callable[[str], Document]) -> bytes:
        """The event of a chunk that holds only text. The JSON around the text is made once: 6 µs a
        chunk, not 18.
        """
        if index not in self._frames:
            before, after = encoded(chunk(HOLE)).split(encoded(HOLE))
            self._frames[index] = b"data: " + before, after + b"\n\n"
        before, after = self._frames[index]
        return before + encoded(text) + after

    def written(self, chunks: Iterable[Document]) -> bytes:
        """Chunks as Server-Sent Events."""
        return b"".join(b"data: " + encoded(chunk) + b"\n\n" for chunk in chunks)

    @classmethod
    def failed(cls, error: Problem) -> bytes:
        """The end of a stream that cannot go on."""
        return b"data: " + encoded(document(error, cls.path)) + b"\n\n"


def _seed(one: Request, known: Known, first: int) -> int:
    """Of the first answer to a request: another one for each that has none, for two may have the
    same prompt.
    """
    seed: int = one.sampling["seed"]
    return (known.seed + first) % SEEDS if seed == RANDOM else seed


def named(chunks: Iterable[Document]) -> bytes:
    """Server-Sent Events that carry their `type` as a name."""
    return b"".join(
        b"event: " + one["type"].encode() + b"\ndata: " + encoded(one) + b"\n\n" for one in chunks
    )


def encoded(found: Any) -> bytes:
    """JSON as bytes. A lone surrogate, which only a client's own text can hold, becomes a question
    mark.
    """
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def usage(answers: Sequence[Answer], samples: int = 1) -> Document:
    """OpenAI's token counts. A prompt counts once, though `samples` answers were made of it."""
    prompt = sum(answer.prompt_tokens for answer in answers[::samples])
    made = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.cached_tokens for answer in answers[::samples])
        },
    }


def timings(answer: Answer) -> Document:
    """llama-server's figures for an answer, which its clients read, and the time to the first
    token.
    """
    fresh, made = answer.prompt_tokens - answer.cached_tokens, len(answer.tokens)
    return {
        "cache_n": answer.cached_tokens,
        "prompt_n": fresh,
        "prompt_ms": answer.prompt_ms,
        "prompt_per_token_ms": answer.prompt_ms / fresh if fresh else 0.0,
        "prompt_per_second": answer.prompt_per_second,
        "predicted_n": made,
        "predicted_ms": answer.generate_ms,
        "predicted_per_token_ms": answer.tpot_ms,
        "predicted_per_second": answer.tokens_per_second,
        "ttft_ms": answer.ttft_ms,
        **(
            {}
            if answer.drafted is None
            else {"draft_n": answer.drafted, "draft_n_accepted": answer.accepted}
        ),
    }


def best(answer: Answer, count: int) -> Sequence[Hypothesis]:
    """What a beam search found, best first and `count` at most. A grammar may allow fewer; where
    nothing was to be drawn there is the empty answer.
    """
    return answer.beams[:count] or (Hypothesis(answer.text, 0.0, ()),)


def stopped_by(runner: Runner, request: Request, answer: Answer) -> str | None:
    """The stop sequence that ended an answer: the drawn tokens hold it, the text that was told does
    not.
    """
    if not request.stops or answer.finish != "stop":
        return None
    drawn = b"".join(runner.model.piece(token.id) for token in answer.tokens).decode(
        "utf-8", "replace"
    )
    return next((one for one in request.stops if one in drawn and one not in answer.text), None)


def reason(answer: Answer) -> str:
    """OpenAI's word for how an answer ended."""
    return "stop" if answer.finish == "stop" else "length"
