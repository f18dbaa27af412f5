"""Totals of a chat session; every answer counts, also if its turn was undone."""

from collections import Counter
from dataclasses import dataclass, field

from llmcli.runtime.requests.request import Answer

LONG = 8  # the least number of tokens for a meaningful speed


@dataclass(slots=True)
class Tally:
    """Sums over the answers of one session. Times are in milliseconds.

    - `prompt`, `reused`: prompt tokens, and those taken from the cache.
    - `generated`, `thought`: generated tokens, and those of the thinking.
    - `first_ms`: the sum of the times to the first token.
    - `best`: tokens per second of the fastest answer with at least LONG tokens.
    - `guessed`, `right`: drafted and accepted tokens.
    - `ends`: how often each finish reason occurred.
    """

    answers: int = 0
    prompt: int = 0
    reused: int = 0
    generated: int = 0
    thought: int = 0
    prompt_ms: float = 0.0
    generate_ms: float = 0.0
    first_ms: float = 0.0
    best: float = 0.0
    guessed: int = 0
    right: int = 0
    gaps: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer, thought: int) -> None:
        """Add an answer; its first `thought` characters are thinking."""
        self.answers += 1
        self.ends[answer.finish] += 1
        self.prompt += answer.prompt_tokens
        self.reused += answer.cached_tokens
        self.prompt_ms += answer.prompt_ms
        self.generated += len(answer.tokens)
        self.thought += _within(answer, thought)
        self.generate_ms += answer.generate_ms
        self.first_ms += answer.ttft_ms
        self.guessed += answer.n_drafted or 0
        self.right += answer.n_accepted
        self.gaps += max(0, len(answer.tokens) - 1)
        if len(answer.tokens) >= LONG:
            self.best = max(self.best, answer.tokens_per_second)

    @property
    def prompt_per_second(self) -> float:
        """Computed prompt tokens per second; reused tokens do not count."""
        return (self.prompt - self.reused) / self.prompt_ms * 1e3 if self.prompt_ms else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second after each answer's first token."""
        return self.gaps / self.generate_ms * 1e3 if self.generate_ms else 0.0


def _within(answer: Answer, characters: int) -> int:
    """Return how many tokens begin within the first `characters` characters."""
    count = position = 0
    for token in answer.tokens:
        if position >= characters:
            break
        position += len(token.text)
        count += 1
    return count
