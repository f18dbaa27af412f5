"""llama-server's fields `return_progress` and `timings_per_token`: a stream also has the progress of
the prompt, and the timings so far in each chunk.
"""

from collections.abc import Iterable
from typing import Any

from llmcli.api.bodies.base import RequestBody
from llmcli.api.bodies.generation_fields import GenerationBody
from llmcli.runtime.requests.thinking import ThinkingLimit, ThinkingTracker
from llmcli.types import Event, PromptProgress, TokenTime

NO_PROGRESS = PromptProgress(0, 0, 0, 0.0)


class _AnswerTimes:
    """What a stream has reported of one answer: the progress of its prompt, and its tokens."""

    def __init__(self, thinking: ThinkingLimit | None = None) -> None:
        self.progress = NO_PROGRESS
        self.n_tokens = 0
        self.first_token_ms = self.generate_ms = 0.0  # the latter without the first token
        self.first_reply_ms: float | None = None
        self._thinking = ThinkingTracker(thinking) if thinking else None

    def add_token(self, token: TokenTime) -> None:
        """Add a token of the answer."""
        if self.n_tokens:
            self.generate_ms += token.ms
        else:
            self.first_token_ms = token.ms
        self.n_tokens += 1
        if self._thinking:
            self._thinking.feed(token.text.encode())
        if self.first_reply_ms is None and not (
            self._thinking and self._thinking.answer_start is None
        ):
            self.first_reply_ms = self.first_token_ms + self.generate_ms


class StreamTelemetry:
    """The telemetry of one stream, as far as the request asks for it.

    `has_progress`, `has_timings`: the request asks for the progress of the prompt, and for timings
    in each chunk. `is_on`: it asks for either.
    """

    def __init__(self, body: RequestBody) -> None:
        self.has_progress = self.has_timings = False
        if isinstance(body, GenerationBody) and body.stream:
            self.has_progress = body.return_progress is True
            self.has_timings = body.timings_per_token is True
        self._answers: dict[int, _AnswerTimes] = {}

    @property
    def is_on(self) -> bool:
        return self.has_progress or self.has_timings

    def record(self, event: Event, thinking: ThinkingLimit | None) -> None:
        """Add an event of the engine. `event.sequence` is the index of its answer. `thinking`: that
        of its request.
        """
        times = self._answers.get(event.sequence)
        if times is None:
            times = self._answers[event.sequence] = _AnswerTimes(thinking)
        if event.progress:
            times.progress = event.progress
        if event.token:
            times.add_token(event.token)

    def add_timings(self, number: int, chunks: Iterable[dict[str, Any]]) -> None:
        """Add the field `timings` to chunks of the answer with this index, if the request asks for
        it.
        """
        if self.has_timings:
            for chunk in chunks:
                chunk["timings"] = self._timings(self._answers.get(number, _AnswerTimes()))

    def _timings(self, times: _AnswerTimes) -> dict[str, Any]:
        """Return llama-server's `timings` object with the counts so far."""
        progress = times.progress
        return timings_document(
            progress.processed,
            progress.cached,
            progress.ms,
            times.n_tokens,
            times.generate_ms,
            times.first_token_ms,
            times.first_reply_ms,
        )


def timings_document(
    n_prompt_tokens: int,
    n_cached: int,
    prompt_ms: float,
    n_tokens: int,
    generate_ms: float,
    first_token_ms: float,
    first_reply_ms: float | None,
) -> dict[str, Any]:
    """Return llama-server's `timings` object, with additional fields: `ttft_ms`, the time to the
    first token, and `ttfo_ms`, the time to the first token of the reply, None before it.

    `n_cached`: the tokens of the prompt that were in the cache. `generate_ms`: the time of the
    answer's tokens without the first.
    """
    computed, gaps = n_prompt_tokens - n_cached, max(0, n_tokens - 1)
    per_token = generate_ms / gaps if gaps else 0.0
    return {
        "cache_n": n_cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed if computed else 0.0,
        "prompt_per_second": computed / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": n_tokens,
        "predicted_ms": generate_ms,
        "predicted_per_token_ms": per_token,
        "predicted_per_second": 1e3 / per_token if per_token else 0.0,
        "ttft_ms": first_token_ms,
        "ttfo_ms": first_reply_ms,
    }


def progress_document(progress: PromptProgress) -> dict[str, Any]:
    """Return llama-server's `prompt_progress` object."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.ms),
    }
