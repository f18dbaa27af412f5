"""Values and protocols that several packages of llmcli share: messages of a conversation, the
tokens of an answer, and progress displays.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

# Why an answer ended. "failed": the model or its grammar could not continue the answer;
# `Answer.error` is the reason.
Finish = Literal["stop", "length", "cancelled", "context_full", "repetition", "failed"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str  # system, user, assistant or tool
    content: str
    # Further fields for the chat template: tool_calls, tool_call_id, name, reasoning_content.
    template_fields: Mapping[str, Any] = field(default_factory=dict, hash=False)


# Named tuples, because each generated token needs one of each, and they are made in half the time
# of a frozen dataclass.
class TokenTime(NamedTuple):
    """One generated token, and how many milliseconds it took.

    - `ms`: the time since the previous token. For the first token, the time since the user's call.
    - `decode_ms`, `sample_ms`, `constraint_ms`: how much of `ms` the forward pass, the sampler and
      the grammar took.
    - `logprob`: the log-softmax over the whole vocabulary; None if it was not requested.
    - `forced`: whether the token was inserted without sampling, because the grammar allowed no
      other.
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
        """Return the milliseconds that neither the forward pass nor the sampler nor the grammar
        took, but detokenizing, stop strings and the display.
        """
        return max(0.0, self.ms - self.decode_ms - self.sample_ms - self.constraint_ms)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt is computed: `processed` of its `total` tokens, of which `cached` were in
    the cache. `ms`: milliseconds of the passes so far.
    """

    total: int
    cached: int
    processed: int
    ms: float


class Event(NamedTuple):
    """What the engine reports about a running answer: usually a new token and its text.

    - `sequence`: the number of the answer.
    - `token`: None in a last event without a token, and in the event of the prompt.
    - `text`: the text that can be shown now. It is empty while the text ends inside a character or
      inside a possible stop string.
    - `finish`: why the answer ended, in its last event; None in all others.
    - `top_logprobs`: the likeliest tokens at the position of `token` and their log-probabilities,
      if requested.
    - `prompt_logprobs`: for every prompt token after the first, its log-probability, and the
      likeliest tokens at its position with theirs. If requested, they are in a separate first
      event.
    - `progress`: how much of the prompt is computed. If requested, it is in separate events before
      the first token.
    """

    sequence: int
    token: TokenTime | None
    text: str
    finish: Finish | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    progress: PromptProgress | None = None


class ProgressBar(Protocol):
    """The progress of one task, shown to the user."""

    def advance(self, amount: int) -> None:
        """Add `amount` to the finished part of the task, in the unit of the bar."""
        ...

    def describe(self, text: str) -> None:
        """Replace the label of the bar."""
        ...


class ProgressDisplay(Protocol):
    """Shows progress bars and notes to the user. UI implements it."""

    def bar(
        self,
        label: str,
        total: int | None,
        unit: Literal["bytes", "tensors", "tests"] = "bytes",
        done: int = 0,
    ) -> AbstractContextManager[ProgressBar]:
        """Show a progress bar during a `with` block. `total`: the size of the task in `unit`; None:
        unknown. `done`: how much of it was finished before.
        """
        ...

    def note(self, text: str) -> None:
        """Print one line that is neither a result nor an error."""
        ...
