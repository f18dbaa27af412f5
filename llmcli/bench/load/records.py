"""One request of a load test and its answer. Times are seconds of `time.perf_counter`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A request to send. Its prompt is `messages`, or else `text` with the system prompt `shared`.

    `shared`: text that several requests have in common. `cancel_after`: the client cancels the
    request after this many chunks with text; 0: as soon as the answer begins; None: never.
    """

    text: str
    max_tokens: int
    shared: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    cancel_after: int | None = None


@dataclass(slots=True)
class LoadAnswer:
    """The answer to one request, filled in by the client while it arrives.

    `scheduled`: when the request was due. `sent`: when it was sent. `arrival_times`: when each
    chunk with text arrived. `token_counts`: the number of tokens in each of these chunks, counted
    from token ids or logprobs; 1 if the chunk has neither. `reply_time`: when the first text that is
    not thinking arrived. `output_tokens`: the server's own count (usage). `error`: the kind of error,
    such as "http 429" or "timeout". `error_message`: the server's text about the error. `measured`: whether the request counts in the measurement.
    """

    scheduled: float
    sent: float = 0.0
    ended: float | None = None
    arrival_times: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_message: str = ""
    cancelled: bool = False
    measured: bool = False
    open_requests: int = 0  # number of unanswered requests when this one was due
    reply_time: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended and has text, and was neither canceled nor ended by an
        error.
        """
        return (
            self.ended is not None
            and self.error is None
            and not self.cancelled
            and bool(self.arrival_times)
        )

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer: the server's count, or the sum over the chunks if the
        server gives none.
        """
        return sum(self.token_counts) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Time to first token: seconds from when the request was due to its first text."""
        return self.arrival_times[0] - self.scheduled

    @property
    def ttfo(self) -> float | None:
        """Time to first answer token: seconds from when the request was due to its first text that
        is not thinking; None if the answer has none.
        """
        return None if self.reply_time is None else self.reply_time - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds per token after the first one; None if the answer has
        only one token.
        """
        return (
            (self.arrival_times[-1] - self.arrival_times[0]) / (self.tokens - 1)
            if self.tokens > 1
            else None
        )

    @property
    def e2el(self) -> float:
        """End-to-end latency: seconds from when the request was due to the last byte of the answer."""
        assert self.ended is not None
        return self.ended - self.scheduled

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive chunks with text."""
        return [after - before for before, after in pairwise(self.arrival_times)]
