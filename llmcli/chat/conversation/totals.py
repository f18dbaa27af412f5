"""Counts the tokens and the time of all answers of a chat session, for /stats. Answers of undone
turns count, too.
"""

from collections import Counter
from dataclasses import dataclass, field

from llmcli.runtime.requests.request import Answer

MIN_SPEED_TOKENS = 8  # shorter answers do not have a meaningful speed


@dataclass(slots=True)
class SessionTotals:
    """Sums over all answers of one session. Names ending in `_ms` are sums of milliseconds.

    - `answers`: number of answers.
    - `prompt_tokens`, `reused_tokens`: tokens of all prompts, and how many were in the cache.
    - `generated_tokens`, `thinking_tokens`: all generated tokens, and how many were thinking.
    - `ttft_ms`: sum of the times to the first token.
    - `ttfo_ms`: sum of the times to the first token of the reply. `replies`: number of answers with
      a reply, which an answer that only thinks lacks.
    - `best_tokens_per_second`: speed of the fastest answer of at least MIN_SPEED_TOKENS tokens.
    - `drafted_tokens`, `accepted_tokens`: tokens of speculative decoding.
    - `n_gaps`: number of generated tokens without the first token of each answer. `generate_ms` is
      the time of these tokens.
    - `finish_counts`: number of answers by finish reason.
    """

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    thinking_tokens: int = 0
    prompt_ms: float = 0.0
    generate_ms: float = 0.0
    ttft_ms: float = 0.0
    ttfo_ms: float = 0.0
    replies: int = 0
    best_tokens_per_second: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    n_gaps: int = 0
    finish_counts: Counter[str] = field(default_factory=Counter)

    def add_answer(self, answer: Answer, thinking_chars: int) -> None:
        """Add the counts of an answer, whose first `thinking_chars` characters are thinking."""
        self.answers += 1
        self.finish_counts[answer.finish] += 1
        self.prompt_tokens += answer.prompt_tokens
        self.reused_tokens += answer.cached_tokens
        self.prompt_ms += answer.prompt_ms
        self.generated_tokens += answer.n_generated
        self.thinking_tokens += _count_tokens_within(answer, thinking_chars)
        self.generate_ms += answer.generate_ms
        self.ttft_ms += answer.ttft_ms
        if answer.ttfo_ms is not None:
            self.ttfo_ms += answer.ttfo_ms
            self.replies += 1
        self.drafted_tokens += answer.n_drafted or 0
        self.accepted_tokens += answer.n_accepted
        self.n_gaps += max(0, answer.n_generated - 1)
        if answer.n_generated >= MIN_SPEED_TOKENS:
            self.best_tokens_per_second = max(self.best_tokens_per_second, answer.tokens_per_second)

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second, without tokens that were in the cache. 0 without answers."""
        return (
            (self.prompt_tokens - self.reused_tokens) / self.prompt_ms * 1e3
            if self.prompt_ms
            else 0.0
        )

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, without the first token of each answer. 0 without tokens."""
        return self.n_gaps / self.generate_ms * 1e3 if self.generate_ms else 0.0


def _count_tokens_within(answer: Answer, characters: int) -> int:
    """Return how many tokens of the answer begin within its first `characters` characters."""
    count = position = 0
    for token in answer.tokens:
        if position >= characters:
            break
        position += len(token.text)
        count += 1
    return count
