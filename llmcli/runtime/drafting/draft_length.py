"""Decides how many tokens to draft: as many as are expected to save the most time, but never more
than the answer can afford to lose.

A pass of m rows that yields k tokens replaces k passes of one row. It saves time if k > T(m) / T(1)
(Leviathan et al. 2023, with a measured cost). The expected k is one more than the sum of the chances
of the draft's nodes (gain/tree_shape.py), and the cost is that of PassCost.

Chances are only estimates, so the time that drafting has saved so far is also counted. Its unit is
the plain token: the time of a pass of one row, which yields one token. A draft is made only if the
answer could afford that all its guesses are wrong. It may then lose what drafting has saved before,
and in addition the share MAX_LOSS_SHARE of the answer's tokens. At the beginning it may lose one
short draft, or two if the chance of the first guess is high. After a longer draft a short one must
still be affordable, so that a single failure does not end drafting.

A drafter with a model may need to read the text first. It may do so if this takes at most the share
MAX_LOSS_SHARE of the time for the prompt and the answer so far, plus the time that drafting has
saved.
"""

import math

from llmcli.runtime.drafting.base import DraftState
from llmcli.runtime.drafting.gain.pass_cost import PASS_ROWS, PassCost
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape

MIN_GAIN = 1.05  # minimum expected gain for which a draft is made
MAX_LOSS_SHARE = 0.02  # share of an answer's tokens that may be lost
# plain tokens that a single draft may lose; if the shortest draft can lose more, it may lose that
FIRST_LOSS_TOKENS = 1.5
SURE_CHANCE = 0.9  # chance of the first guess from which twice as much may be lost
# a pass that takes longer than expected by more than this factor was slowed down by other programs
MAX_SLOWDOWN = 1.25


class DraftLength:
    """Chooses the lengths of drafts in one answer, and counts what drafting has saved or lost in
    it. The unit is the plain token, the time of a pass of one row.
    """

    def __init__(
        self,
        pass_cost: PassCost,
        max_rows: int = PASS_ROWS[-1],
        max_free_guesses: float = math.inf,
        takes_longest: bool = False,
        max_branches: int = 1,
    ) -> None:
        """`max_free_guesses`: the most guesses of a draft after which wrong ones are dropped for
        nothing. A longer draft needs a checkpoint before it, and after a wrong guess the right ones
        are computed again. `takes_longest`: make every draft as long as possible, whatever it costs.
        `max_branches`: the most paths of a draft.
        """
        self.pass_cost, self.max_rows, self.max_branches = pass_cost, max_rows, max_branches
        self.max_free_guesses, self.takes_longest = max_free_guesses, takes_longest
        self.n_tokens, self.saved_tokens = 0, 0.0
        self.had_several_rows = False  # whether the last pass had several rows
        # plain tokens that the drafter may spend on reading the text, in proportion to the time
        # that the prompt took
        self.reading_budget = 0.0

    def record_prompt(self, seconds: float) -> None:
        """Record the seconds of the passes over the prompt, the last of which yielded the first
        token.
        """
        if not self.n_tokens:
            self.n_tokens, self.reading_budget = (
                1,
                MAX_LOSS_SHARE * seconds / self.pass_cost.single_seconds,
            )

    def record_single(self, seconds: float, is_shared: bool = False) -> None:
        """Record a pass of one row, which yielded one token in `seconds`. `is_shared`: the pass
        computed other answers, too, so its time is not that of one row.
        """
        self.n_tokens += 1
        if is_shared:
            return
        if self.had_several_rows:
            self.had_several_rows = False
            self.pass_cost.record_switch(seconds)
        else:
            self.pass_cost.record_pass(1, seconds)

    def record_draft(
        self,
        rows: int,
        n_tokens: int,
        seconds: float,
        drafting_seconds: float,
        reading_seconds: float = 0.0,
        n_text_rows: int = 1,
    ) -> None:
        """Record a pass of `rows` rows, which checked a draft and yielded `n_tokens` tokens in
        `seconds`. The draft took `drafting_seconds` outside the pass, which include
        `reading_seconds` for reading the text. `n_text_rows`: the rows that the pass would have had
        without the draft.
        """
        # other programs caused the time beyond this limit
        expected_seconds = min(seconds, MAX_SLOWDOWN * self.pass_cost(rows))
        self.pass_cost.record_pass(rows, seconds)
        prepaid = min(self.reading_budget, reading_seconds / self.pass_cost.single_seconds)
        self.reading_budget -= prepaid
        self.n_tokens += n_tokens
        self.saved_tokens += (
            n_tokens
            + prepaid
            - (expected_seconds + drafting_seconds) / self.pass_cost.single_seconds
            + (self.pass_cost.ratio(n_text_rows) - 1)
            - self.switch_cost
        )
        self.had_several_rows = True

    def record_repetition(self, n_tokens: int) -> None:
        """Record that the next pass must compute `n_tokens` tokens again, besides a new one."""
        if n_tokens > 0:
            self.saved_tokens -= self.pass_cost.ratio(n_tokens + 1) - 1

    def record_unused(self, seconds: float) -> None:
        """Record a draft that took `seconds` and was not checked, because it was empty or discarded."""
        self.saved_tokens -= seconds / self.pass_cost.single_seconds

    def refuse_checkpoints(self) -> None:
        """Make only drafts whose wrong guesses are dropped for nothing from now on."""
        self.max_rows = int(min(self.max_rows, self.max_free_guesses + 1))

    def rate(
        self, drafts: DraftState, limit: float, n_text_rows: int = 1
    ) -> tuple[float, TreeShape]:
        """Return the expected gain of the best draft of a drafter, and its shape, whose paths have
        at most `limit` guesses. The shape is empty when no draft is expected to save time or is
        affordable. The gain is the speed of the pass in units of plain decoding. `n_text_rows`: the
        rows of the pass without the draft.
        """
        n_nodes = max(0, self.max_rows - n_text_rows)
        shape = drafts.shape(ShapeLimits(n_nodes, int(min(n_nodes, limit)), self.max_branches))
        if self.takes_longest:
            return 1.0, shape
        nothing = TreeShape()
        if (
            not shape
            or len(shape) < shape.least
            or not self.can_read(drafts.reading_seconds() / self.pass_cost.single_seconds)
        ):
            return 0.0, nothing
        best, chosen = MIN_GAIN, 0
        expected, n_summed, n_depths = 1.0, 0, 0
        depths = shape.depths()
        # the cost of the pass without the draft, beyond that of one row
        text_cost = self.pass_cost.ratio(n_text_rows) - 1
        least_rows = min(n_text_rows + max(1, shape.least), PASS_ROWS[-1])
        shortest = next(rows for rows in PASS_ROWS if rows >= least_rows)
        short_cost = (
            self.pass_cost.ratio(shortest)
            - text_cost
            + drafts.cost_seconds(shape.shorten(max(0, shortest - n_text_rows)).n_depths)
            / self.pass_cost.single_seconds
            - 1
            + self.switch_cost
        )
        risk = max(short_cost, FIRST_LOSS_TOKENS) * (2 if shape.chances[0] >= SURE_CHANCE else 1)
        for width in PASS_ROWS:
            count = max(0, min(width - n_text_rows, len(shape)))
            for node in range(n_summed, count):
                expected += shape.chances[node]
                n_depths = max(n_depths, depths[node] + 1)
            n_summed = count
            if count < max(1, shape.least):
                continue
            cost = (
                self.pass_cost.optimistic_ratio(n_text_rows + count)
                - text_cost
                + drafts.cost_seconds(n_depths) / self.pass_cost.single_seconds
                + self.switch_cost
            )
            if count > self.max_free_guesses:
                checkpoint = self.pass_cost.checkpoint_seconds / self.pass_cost.single_seconds
                n_again = count // 2 + 1  # about half of them are right, if any is wrong
                back = checkpoint + self.pass_cost.ratio(n_again + 1) - 1
                all_right = shape.chances[count - 1]  # of a single path, as recurrent state has
                cost += checkpoint + (1 - all_right) * back
            if expected > best * cost and self.can_afford(
                cost if width == shortest else cost + short_cost, risk
            ):
                best, chosen = expected / cost, count
            if count == len(shape):
                break
        return best, shape.shorten(chosen)

    @property
    def switch_cost(self) -> float:
        """Return the additional cost, in plain tokens, of changing between passes of one row and of
        several rows. It is 0 when the last pass already had several rows.
        """
        return 0.0 if self.had_several_rows else self.pass_cost.switch_cost

    def can_afford(self, cost: float, risk: float) -> bool:
        """Return whether the answer can afford a pass that costs `cost` plain tokens and yields
        only one token, because all guesses are wrong. `risk`: plain tokens that may be lost in any
        case.
        """
        return self.saved_tokens + 1 - cost >= -max(risk, MAX_LOSS_SHARE * self.n_tokens)

    def can_read(self, cost: float) -> bool:
        """Return whether the answer can afford that the drafter reads the text for `cost` plain
        tokens.
        """
        return (
            not cost
            or cost
            <= self.reading_budget + max(0.0, self.saved_tokens) + MAX_LOSS_SHARE * self.n_tokens
        )
