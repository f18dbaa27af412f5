"""Totals of a chat session; every answer counts, also if its turn was undone."""

from collections import Counter
from dataclasses import dataclass, field

from llmcli.runtime.requests.request import Answer

MIN_SPEED_TOKENS = 8  # the least number of tokens for a meaningful speed


@dataclass(slots=True)
class SessionTotals:
    """Sums over the answers of one session. Times are in milliseconds.

    - `reused_tokens`: the prompt tokens that were taken from the cache.
    - `generated_tokens`, `thinking_tokens`: all generated tokens, and those of the thinking.
    - `ttft_ms`: the sum of the times to the first token.
    - `best_tokens_per_second`: of the fastest answer with at least MIN_SPEED_TOKENS tokens.
    - `n_gaps`: the generated tokens after each answer's first one.
    - `finish_counts`: how often each finish reason occurred.
    """

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    thinking_tokens: int = 0
    prompt_ms: float = 0.0
    generate_ms: float = 0.0
    ttft_ms: float = 0.0
    best_tokens_per_second: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    n_gaps: int = 0
    finish_counts: Counter[str] = field(default_factory=Counter)

    def add_answer(self, answer: Answer, thinking_chars: int) -> None:
        """Add an answer; its first `thinking_chars` characters are thinking."""
        self.answers += 1
        self.finish_counts[answer.finish] += 1
        self.prompt_tokens += answer.prompt_tokens
        self.reused_tokens += answer.cached_tokens
        self.prompt_ms += answer.prompt_ms
        self.generated_tokens += len(answer.tokens)
        self.thinking_tokens += _tokens_within(answer, thinking_chars)
        self.generate_ms += answer.generate_ms
        self.ttft_ms += answer.ttft_ms
        self.drafted_tokens += answer.n_drafted or 0
        self.accepted_tokens += answer.n_accepted
        self.n_gaps += max(0, len(answer.tokens) - 1)
        if len(answer.tokens) >= MIN_SPEED_TOKENS:
            self.best_tokens_per_second = max(self.best_tokens_per_second, answer.tokens_per_second)

    @property
    def prompt_per_second(self) -> float:
        """Computed prompt tokens per second; reused tokens do not count."""
        return (
            (self.prompt_tokens - self.reused_tokens) / self.prompt_ms * 1e3
            if self.prompt_ms
            else 0.0
        )

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second after each answer's first token."""
        return self.n_gaps / self.generate_ms * 1e3 if self.generate_ms else 0.0


def _tokens_within(answer: Answer, characters: int) -> int:
    """Return how many tokens begin within the first `characters` characters."""
    count = position = 0
    for token in answer.tokens:
        if position >= characters:
            break
        position += len(token.text)
        count += 1
    return count
