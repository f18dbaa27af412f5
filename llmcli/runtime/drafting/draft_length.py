"""Decides how many tokens to draft: as many as are expected to pay, but never more than the answer
can afford to lose.

A pass of m rows that yields k tokens replaces k passes of one row. It pays if k > T(m) / T(1)
(Leviathan et al. 2023, with a measured cost). The expected k comes from the drafter's chances, the
cost from PassCost.

Because chances are only estimates, the tokens that drafting has saved so far are counted. The unit
is the time of a pass of one row, a plain token. A draft is made only if the answer could afford
that all its guesses are wrong: it may lose what drafting has saved before, and MAX_LOSS_SHARE of
its tokens. At the beginning it may lose one short draft, or two when the drafter is sure. A longer
draft must leave enough for a short draft after it, so that one failure does not end drafting.

A draft model may read the text if this takes at most MAX_LOSS_SHARE of the time for the prompt and
the answer so far, in addition to the time that drafting has saved.
"""

from llmcli.runtime.drafting.base import DraftState
from llmcli.runtime.drafting.pass_cost import PASS_ROWS, PassCost

MIN_GAIN = 1.05  # minimum expected gain for which a draft is made
MAX_LOSS_SHARE = 0.02  # share of an answer's tokens that may be lost
FIRST_LOSS_TOKENS = 1.5  # plain tokens that may be lost at once; more if four wrong rows cost more
SURE_CHANCE = 0.9  # chance of the first guess from which FIRST_LOSS_TOKENS counts twice
# if a pass takes longer than expected by more than this factor, other programs are the cause
MAX_SLOWDOWN = 1.25


class DraftLength:
    """The gains and losses of drafting in one answer, in plain tokens."""

    def __init__(self, pass_cost: PassCost, max_rows: int = PASS_ROWS[-1]) -> None:
        self.pass_cost, self.max_rows = pass_cost, max_rows
        self.n_tokens, self.saved_tokens = 0, 0.0
        self.had_several_rows = False  # whether the last pass had several rows
        # plain tokens that reading the text may cost, because the prompt took so long
        self.reading_budget = 0.0

    def record_prompt(self, seconds: float) -> None:
        """Record the seconds of the prompt's passes. Its last row yielded a token."""
        if not self.n_tokens:
            self.n_tokens, self.reading_budget = (
                1,
                MAX_LOSS_SHARE * seconds / self.pass_cost.single_seconds,
            )

    def record_single(self, seconds: float) -> None:
        """Record a pass of one row that yielded a token."""
        self.n_tokens += 1
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
    ) -> None:
        """Record a pass of several rows that yielded `n_tokens` tokens. Drafting took
        `drafting_seconds` before it, of which `reading_seconds` were spent reading the text.
        """
        expected_seconds = min(
            seconds, MAX_SLOWDOWN * self.pass_cost(rows)
        )  # other programs caused the time beyond this limit
        self.pass_cost.record_pass(rows, seconds)
        prepaid = min(self.reading_budget, reading_seconds / self.pass_cost.single_seconds)
        self.reading_budget -= prepaid
        self.n_tokens += n_tokens
        self.saved_tokens += (
            n_tokens
            + prepaid
            - (expected_seconds + drafting_seconds) / self.pass_cost.single_seconds
            - self.switch_cost
        )
        self.had_several_rows = True

    def choose(self, guesses: DraftState, limit: float) -> int:
        """Return how many tokens to draft, at most `limit`; 0 when no draft pays."""
        chances = guesses.chances(int(min(self.max_rows - 1, limit)))
        if not chances or not self.can_read(
            guesses.reading_seconds() / self.pass_cost.single_seconds
        ):
            return 0
        best, chosen = MIN_GAIN, 0
        expected, right, counted = 1.0, 1.0, 0
        short = PASS_ROWS[0]
        again = (
            self.pass_cost.ratio(short)
            + guesses.cost_seconds(short - 1) / self.pass_cost.single_seconds
            - 1
            + self.switch_cost
        )
        risk = max(again, FIRST_LOSS_TOKENS) * (2 if chances[0] >= SURE_CHANCE else 1)
        for width in PASS_ROWS:
            count = min(width - 1, len(chances))
            for chance in chances[counted:count]:
                right *= chance
                expected += right
            counted = count
            cost = (
                self.pass_cost.optimistic_ratio(count + 1)
                + guesses.cost_seconds(count) / self.pass_cost.single_seconds
                + self.switch_cost
            )
            if expected > best * cost and self.can_afford(
                cost if width == short else cost + again, risk
            ):
                best, chosen = expected / cost, count
            if count == len(chances):
                break
        return chosen

    @property
    def switch_cost(self) -> float:
        """Return the extra cost of a pass of several rows after a single row, for the switch
        between them, in plain tokens. It is 0 when the last pass had several rows.
        """
        return 0.0 if self.had_several_rows else self.pass_cost.switch_cost

    def can_afford(self, cost: float, risk: float) -> bool:
        """Return whether the answer can afford a pass that costs `cost` plain tokens and yields
        only one token. `risk`: plain tokens that may be lost in any case.
        """
        return self.saved_tokens + 1 - cost >= -max(risk, MAX_LOSS_SHARE * self.n_tokens)

    def can_read(self, cost: float) -> bool:
        """Return whether the answer can afford to read the text for a cost of `cost` plain tokens."""
        return (
            not cost
            or cost
            <= self.reading_budget + max(0.0, self.saved_tokens) + MAX_LOSS_SHARE * self.n_tokens
        )
