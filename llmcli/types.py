"""Values and protocols that several packages share."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# "failed": the model or its grammar could not continue this answer; `Answer.error` gives the
# reason.
Finish = Literal["stop", "length", "cancelled", "context_full", "repetition", "failed"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `role` is system, user, assistant or tool. `template_fields` contains further fields that chat
    templates read: tool_calls, tool_call_id, name, reasoning_content.
    """

    role: str
    content: str
    template_fields: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class TokenTime:
    """One generated token and its time in milliseconds.

    - `ms`: the time since the previous token; for the first token, since the call.
    - `decode_ms`, `sample_ms`, `constraint_ms`: the parts of `ms` spent in the forward pass, the
      sampler and the grammar.
    - `logprob`: the log-softmax over the whole vocabulary, None if it was not requested.
    - `forced`: the grammar allowed only this token, so none was sampled.
    """

    id: int
    text: str
    ms: float
    decode_ms: float
    sample_ms: float
    logprob: float | None = None
    constraint_ms: float = 0.0
    forced: bool = False

    @property
    def other_ms(self) -> float:
        """Milliseconds outside the forward pass, sampling and the grammar: detokenizing, stop
        strings, display.
        """
        return max(0.0, self.ms - self.decode_ms - self.sample_ms - self.constraint_ms)


@dataclass(frozen=True, slots=True)
class Event:
    """What one step produced for one sequence: a token, and the text that became visible with it.

    - `text` may be empty: the token ends inside a character or inside a possible stop string.
    - `finish` is set in the last event of a sequence; that event has no token if the sequence ended
      without one.
    - `top_logprobs`: the likeliest tokens of the step and their log-probabilities, if requested.
    - `prompt_logprobs`: for every prompt token after the first, its log-probability and the
      likeliest tokens there, if requested. It comes in a separate event before all others.
    """

    sequence: int
    token: TokenTime | None
    text: str
    finish: Finish | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class ProgressBar(Protocol):
    """A running progress display."""

    def advance(self, amount: int) -> None: ...

    def describe(self, text: str) -> None: ...


class ProgressDisplay(Protocol):
    """A receiver of progress bars and notes, such as the terminal."""

    def bar(
        self,
        label: str,
        total: int | None,
        unit: Literal["bytes", "tensors", "tests"] = "bytes",
        done: int = 0,
    ) -> AbstractContextManager[ProgressBar]: ...

    def note(self, text: str) -> None:
        """Print one line that is neither a result nor an error."""
        ...
