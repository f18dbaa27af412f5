"""One request and its answer. Times are seconds of `time.perf_counter`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A request to send. `shared`: a system prompt common to several requests. `messages`: sent
    instead of the text if set.

    `cancel_after`: the client cancels the request after this many chunks with text; 0: as soon as
    the answer begins.
    """

    text: str
    max_tokens: int
    shared: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    cancel_after: int | None = None


@dataclass(slots=True)
class LoadAnswer:
    """The answer to one request, filled in by the client that sends it.

    `scheduled`: when the request was due. `sent`: when it was sent. `arrival_times`: of chunks with
    text. `token_counts`: tokens of each chunk, from its ids or logprobs, otherwise 1.
    `output_tokens`: the server's count (usage). `error`: a kind such as "http 429" or "timeout".
    `error_message`: the server's text.
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
    open_requests: int = 0  # requests that were running when this one was due

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete."""
        return (
            self.ended is not None
            and self.error is None
            and not self.cancelled
            and bool(self.arrival_times)
        )

    @property
    def tokens(self) -> int:
        """Tokens of the answer: the server's count, otherwise the sum over the chunks."""
        return sum(self.token_counts) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Seconds from the due time to the first text."""
        return self.arrival_times[0] - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None for a single token."""
        return (
            (self.arrival_times[-1] - self.arrival_times[0]) / (self.tokens - 1)
            if self.tokens > 1
            else None
        )

    @property
    def e2el(self) -> float:
        """Seconds from the due time to the last byte."""
        assert self.ended is not None
        return self.ended - self.scheduled

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals of text."""
        return [after - before for before, after in pairwise(self.arrival_times)]
