"""One request and what came of it. Times are seconds of `time.perf_counter`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be sent. `shared` is a system prompt that others send too; `messages` given: they
    are sent instead.

    `cancel_after`: the client goes away after so many chunks with text (0: as soon as the answer
    begins).
    """

    text: str
    max_tokens: int
    shared: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    cancel_after: int | None = None


@dataclass(slots=True)
class Answer:
    """What became of one request. The client that sends it fills this in; nobody changes it
    afterwards.

    `scheduled` is when it should have been sent, `sent` when it was. `stamps` are the arrivals of
    chunks with text, `counts` the tokens of each where the chunk tells (its ids or logprobs), else
    1. `output_tokens` is what the server counted (usage). `error` is a kind ("http 429", "timeout",
    …), `says` what the server wrote.
    """

    scheduled: float
    sent: float = 0.0
    ended: float | None = None
    stamps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    says: str = ""
    cancelled: bool = False
    measured: bool = False
    beside: int = 0  # requests that were running when this one was due

    @property
    def good(self) -> bool:
        """Whether it was answered to its end."""
        return (
            self.ended is not None
            and self.error is None
            and not self.cancelled
            and bool(self.stamps)
        )

    @property
    def tokens(self) -> int:
        """Tokens of the answer: the server's count, else those of the chunks."""
        return sum(self.counts) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first text."""
        return self.stamps[0] - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first one; None where there is only one."""
        return (self.stamps[-1] - self.stamps[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def e2el(self) -> float:
        """Seconds from when it was due to its last byte."""
        assert self.ended is not None
        return self.ended - self.scheduled

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals of text."""
        return [after - before for before, after in pairwise(self.stamps)]
