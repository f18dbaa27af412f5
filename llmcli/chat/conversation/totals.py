"""What a sitting has added up to: every answer counted once, whatever became of its turn."""

from collections import Counter
from dataclasses import dataclass, field

from llmcli.runtime.requests.request import Answer

LONG = 8  # tokens from which an answer's speed says something


@dataclass(slots=True)
class Tally:
    """Sums over the answers of one sitting; times in milliseconds. `best` is the fastest long
    answer's tok/s; of `guessed` tokens `right` ones came true.
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
        """One more answer; `thought` characters at its beginning are thinking."""
        self.answers += 1
        self.ends[answer.finish] += 1
        self.prompt += answer.prompt_tokens
        self.reused += answer.cached_tokens
        self.prompt_ms += answer.prompt_ms
        self.generated += len(answer.tokens)
        self.thought += _within(answer, thought)
        self.generate_ms += answer.generate_ms
        self.first_ms += answer.ttft_ms
        self.guessed += answer.drafted or 0
        self.right += answer.accepted
        self.gaps += max(0, len(answer.tokens) - 1)
        if len(answer.tokens) >= LONG:
            self.best = max(self.best, answer.tokens_per_second)

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens computed a second; what was reused does not count."""
        return (self.prompt - self.reused) / self.prompt_ms * 1e3 if self.prompt_ms else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after each answer's first, per second of generating."""
        return self.gaps / self.generate_ms * 1e3 if self.generate_ms else 0.0


def _within(answer: Answer, characters: int) -> int:
    """How many tokens begin within the first characters."""
    count = at = 0
    for token in answer.tokens:
        if at >= characters:
            break
        at += len(token.text)
        count += 1
    return count
