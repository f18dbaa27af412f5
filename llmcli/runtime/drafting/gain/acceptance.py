"""How often a drafter's guesses are right, by their depth in a draft and their rank."""

from collections.abc import Sequence

MAX_RANKS = 4  # guesses of one token that are counted
INITIAL_CHANCE = 0.85  # chance of the best guess before any guess was checked
# chance of the next guess before any was checked, as a share of what the better ones leave
INITIAL_RANK_SHARE = 0.3
INITIAL_WEIGHT = 4.0  # number of checked guesses that an initial chance counts as
GUESS_DECAY = 0.98  # factor of the counts of earlier guesses for each checked guess
# factor of these counts for each step of the answer, so that drafting is tried again after failures
TOKEN_DECAY = 0.995


class Acceptance:
    """The estimated chance of a guess at each depth, if all guesses before it are right. Depth 0 is
    the first guess of a draft, and rank 0 the best guess of a token. A depth without checked guesses
    has the chances of the one before.
    """

    def __init__(self, initial_chance: float = INITIAL_CHANCE) -> None:
        self.initial_chance = initial_chance
        # by depth and rank
        self.hits: list[list[float]] = []
        self.tries: list[list[float]] = []

    def record(
        self, candidates: Sequence[Sequence[int]], tokens: Sequence[int], extends_all: bool = False
    ) -> None:
        """Record the guesses for each depth, the best first, and the tokens that the model has
        chosen there. `extends_all`: whether the guesses of a depth follow any token. Otherwise they
        follow only the best guess of the depth before.
        """
        for depth, (guesses, token) in enumerate(zip(candidates, tokens, strict=False)):
            if depth == len(self.tries):
                self.hits.append([0.0] * MAX_RANKS)
                self.tries.append([0.0] * MAX_RANKS)
            for rank, guess in enumerate(guesses[:MAX_RANKS]):
                self.hits[depth][rank] = self.hits[depth][rank] * GUESS_DECAY + (guess == token)
                self.tries[depth][rank] = self.tries[depth][rank] * GUESS_DECAY + 1
            if not extends_all and (not guesses or guesses[0] != token):
                break

    def forget(self) -> None:
        """Give the guesses so far less weight, which is done at each step of an answer."""
        for counts in (*self.hits, *self.tries):
            for rank in range(MAX_RANKS):
                counts[rank] *= TOKEN_DECAY

    def chances(self, n_depths: int, n_ranks: int = 1) -> list[list[float]]:
        """Return the chances of the first `n_ranks` guesses of each of the first depths."""
        chances = self._initial_chances(n_ranks)
        found: list[list[float]] = []
        for depth in range(n_depths):
            if depth < len(self.tries):
                chances = [
                    (self.hits[depth][rank] + chance * INITIAL_WEIGHT)
                    / (self.tries[depth][rank] + INITIAL_WEIGHT)
                    for rank, chance in enumerate(chances)
                ]
            found.append(chances)
        return found

    def _initial_chances(self, n_ranks: int) -> list[float]:
        chances = [self.initial_chance]
        while len(chances) < n_ranks:
            chances.append(INITIAL_RANK_SHARE * (1 - sum(chances)))
        return chances
