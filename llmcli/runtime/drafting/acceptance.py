"""How often a drafter's guesses are right, by their depth in a draft."""

INITIAL_CHANCE = 0.85  # chance of a guess before any guess was checked
INITIAL_WEIGHT = 4.0  # number of checked guesses that INITIAL_CHANCE counts as
GUESS_DECAY = 0.98  # factor of the counts of earlier guesses for each checked guess
# factor of these counts for each step of the answer, so that drafting is tried again after failures
TOKEN_DECAY = 0.995


class Acceptance:
    """The estimated chance of a guess at each depth, if all guesses before it are right. Depth 0 is
    the first guess of a draft. A depth without checked guesses has the chance of the one before.
    """

    def __init__(self, initial_chance: float = INITIAL_CHANCE) -> None:
        self.initial_chance = initial_chance
        self.hits: list[float] = []
        self.tries: list[float] = []

    def record(self, n_checked: int, n_right: int) -> None:
        """Record `n_checked` checked guesses of a draft, the first `n_right` of which were right."""
        for depth in range(min(n_checked, n_right + 1)):
            if depth == len(self.tries):
                self.hits.append(0.0)
                self.tries.append(0.0)
            self.hits[depth] = self.hits[depth] * GUESS_DECAY + (depth < n_right)
            self.tries[depth] = self.tries[depth] * GUESS_DECAY + 1

    def forget(self) -> None:
        """Give the guesses so far less weight, which is done at each step of an answer."""
        self.hits = [value * TOKEN_DECAY for value in self.hits]
        self.tries = [value * TOKEN_DECAY for value in self.tries]

    def chances(self, count: int) -> list[float]:
        """Return the chances of the first `count` guesses of a draft."""
        found: list[float] = []
        chance = self.initial_chance
        for depth in range(count):
            if depth < len(self.tries):
                weight = self.tries[depth] + INITIAL_WEIGHT
                chance = (self.hits[depth] + chance * INITIAL_WEIGHT) / weight
            found.append(chance)
        return found
