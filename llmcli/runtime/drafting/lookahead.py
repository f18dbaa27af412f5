"""Lookahead decoding: the model's own parallel predictions are the guesses of the next pass, and a
pool remembers which token followed which.

A pass over guesses also predicts what follows each of them, even after a wrong one. These predictions
are the next guesses (a Jacobi iteration), and pairs and triples of guess and prediction go to a pool.
A draft is a chain from the pool, filled up with the predictions of the last pass.

The method needs no second model and no repetitions in the text, but its guesses are rarely right at
first: it saves time only where several rows cost hardly more than one, as on GPUs. It is used only
if --draft names it.

Source: Fu et al. 2024, Break the Sequential Dependency of LLM Inference Using Lookahead Decoding;
here with one chain of guesses instead of several branches.
"""

from collections.abc import Sequence as Rows
from typing import ClassVar

from llmcli.runtime.drafting.acceptance import Acceptance
from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits

WINDOW_TOKENS = 15  # guesses that are kept for the next pass
FIRST_CHANCE = 0.5  # chance of a guess before any guess was checked
MAX_POOL_ENTRIES = 1 << 16  # the oldest are dropped


class LookaheadDrafter:
    """The drafter. Its statistics are those of all answers."""

    name: ClassVar[str] = "lookahead"
    order: ClassVar[int] = 30
    draws: ClassVar[bool] = False

    def __init__(self) -> None:
        self.acceptance = Acceptance(FIRST_CHANCE)

    @classmethod
    def create(cls, resources: DrafterResources) -> "LookaheadDrafter | None":
        """Create the drafter. Return None when it is not requested."""
        return cls() if resources.uses_lookahead else None

    def start(self, request: Request, seed: int) -> "LookaheadDrafts":
        """Return the state for a new answer."""
        return LookaheadDrafts(self.acceptance)


class LookaheadDrafts:
    """The guesses of one answer: the predictions of the last pass, and the pool of n-grams."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.tokens: list[int] = []
        self.window: list[int] = []
        self.pool: dict[tuple[int, ...], int] = {}  # oldest first

    def follow(self, sequence: Sequence) -> None:
        self.tokens = sequence.tokens
        self.acceptance.forget()

    def on_context_shift(self) -> None:
        """Do nothing: only the last tokens matter."""

    def observe_rows(self, tokens: Rows[int], rows: Rows[RowLogits], n_right: int) -> None:
        """Read the predictions of a pass (see RowObserver)."""
        predictions = [int(row.logits.argmax()) for row in rows]
        for number in range(1, len(tokens)):
            self._remember((tokens[number - 1], tokens[number]), predictions[number])
            self._remember((tokens[number],), predictions[number])
        self.window = predictions[n_right + 1 :]

    def _remember(self, key: tuple[int, ...], token: int) -> None:
        """Add an n-gram to the pool as its newest entry."""
        self.pool.pop(key, None)
        self.pool[key] = token
        if len(self.pool) > MAX_POOL_ENTRIES:
            del self.pool[next(iter(self.pool))]

    def guess(self, count: int) -> list[int]:
        """Return `count` guesses."""
        guesses: list[int] = []
        while len(guesses) < count:
            text = [*self.tokens[-2:], *guesses]
            token = self.pool.get(tuple(text[-2:]), self.pool.get(tuple(text[-1:])))
            if token is None:
                break
            guesses.append(token)
        guesses += self.window[len(guesses) : WINDOW_TOKENS]
        # The text itself is as good a start as any: the next pass replaces it by predictions.
        while len(guesses) < count:
            guesses.append(self.tokens[-1 - len(guesses) % len(self.tokens)])
        return guesses[:count]

    def chances(self, count: int) -> list[float]:
        return self.acceptance.chances(count) if self.tokens else []

    def cost_seconds(self, count: int) -> float:
        return 0.0

    def reading_seconds(self) -> float:
        return 0.0

    def draft(self, count: int) -> Draft:
        """Return `count` guesses."""
        return Draft(self.guess(count))

    def record_result(self, n_checked: int, n_right: int) -> None:
        self.acceptance.record(n_checked, n_right)

    def close(self, tokens: Rows[int]) -> None:
        """Do nothing, because there are no resources to free."""


DRAFTERS = (LookaheadDrafter,)
