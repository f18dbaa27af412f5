"""Drafters whose guesses are known beforehand, and a price of passes that does not move."""

import random
from collections.abc import Sequence as Tokens
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, Tools
from llmcli.runtime.drafting.curve import Curve
from llmcli.runtime.request import Request
from llmcli.runtime.sequence import Sequence

CHEAP = {1: 1.0, 4: 1.1, 8: 1.2, 12: 1.3, 16: 1.4}


class Steady(Curve):
    """Prices that no pass changes."""

    def saw(self, rows: int, seconds: float) -> None:
        pass

    def turned(self, seconds: float) -> None:
        pass


class Knowing:
    """Guesses the answer that it was told, and spoils each guess with a chance of its own."""

    name: ClassVar[str] = "knowing"
    order: ClassVar[int] = 0
    draws: ClassVar[bool] = False

    def __init__(
        self,
        answer: Tokens[int],
        right: float = 1,
        chance: float | None = None,
        n_vocab: int = 256,
        seed: int = 0,
    ) -> None:
        self.answer, self.right, self.n_vocab = list(answer), right, n_vocab
        self.chance = right if chance is None else chance  # what it says of itself
        self.random = random.Random(seed)
        self.sequence: Sequence | None = None
        self.heard: list[tuple[int, int]] = []  # drafted and accepted, of each pass

    @classmethod
    def made(cls, tools: Tools) -> None:
        """It takes an answer to make one."""

    def start(self, request: Request, seed: int) -> "Knowing":
        return self

    def follow(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def _next(self) -> list[int]:
        assert self.sequence
        return self.answer[len(self.sequence.tokens) - len(self.sequence.request.tokens) :]

    def chances(self, count: int) -> list[float]:
        return [self.chance] * min(count, len(self._next()))

    def shortened(self) -> None:
        pass

    def cost(self, count: int) -> float:
        return 0.0

    def reading(self) -> float:
        return 0.0

    def draft(self, count: int) -> Draft:
        wrong = [(token + 1) % self.n_vocab for token in self._next()[:count]]
        pairs = zip(self._next(), wrong, strict=False)
        return Draft(
            [token if self.random.random() < self.right else other for token, other in pairs]
        )

    def judged(self, drafted: int, accepted: int) -> None:
        self.heard.append((drafted, accepted))

    def close(self) -> None:
        pass
