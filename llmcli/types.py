"""The nouns that several rooms share: frozen values without behaviour, and two small protocols."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# "failed": the model could not go on with this answer, or not in its grammar; `Answer.error` says
# why.
Finish = Literal["stop", "length", "cancelled", "context_full", "repetition", "failed"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` is system, user, assistant or tool. `more` are further
    fields as templates know them: tool_calls, tool_call_id, name, reasoning_content.
    """

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class TokenTime:
    """One generated token and where its time went, in milliseconds.

    `ms` is the whole gap since the token before (for the first one: since the call), `decode_ms`,
    `sample_ms` and `constraint_ms` (in a grammar) are parts of it, the rest is ours. `logprob` is
    the log-softmax over the whole vocabulary, None where nobody asked for it. `forced`: a grammar
    left no other, and nothing was drawn.
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
    def rest_ms(self) -> float:
        """What is neither decode, sampling nor grammar: detokenizing, stop strings, the screen."""
        return max(0.0, self.ms - self.decode_ms - self.sample_ms - self.constraint_ms)


@dataclass(frozen=True, slots=True)
class Event:
    """What one step gave one sequence: a token and the text that became visible with it.

    `text` may be empty (half a character, or the beginning of what may be a stop string). `top` are
    the likeliest tokens of the step and their log-probabilities, where they were asked for.
    `prompt`, in an event of its own before the others: how likely each token of the prompt but the
    first was, and the likeliest there, where that was asked. The last event of a sequence carries
    `finish`; it has no token where the end came without one.
    """

    sequence: int
    token: TokenTime | None
    text: str
    finish: Finish | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class Bar(Protocol):
    """A running progress display."""

    def advance(self, amount: int) -> None: ...

    def describe(self, text: str) -> None: ...


class Watcher(Protocol):
    """Someone who is told how long work goes: the terminal, or nobody."""

    def bar(
        self,
        label: str,
        total: int | None,
        unit: Literal["bytes", "tensors", "tests"] = "bytes",
        done: int = 0,
    ) -> AbstractContextManager[Bar]: ...

    def note(self, text: str) -> None:
        """Say one line that is neither a result nor an error."""
        ...
