"""How many tokens to draft: as many as pay, but never more than the answer can afford to lose.

A pass of m rows that yields k tokens instead of k passes of one row pays if k > T(m) / T(1)
(Leviathan et al. 2023, with a measured cost). The expected k comes from the drafter's chances, the
cost from PassCost. Because chances are estimates, a balance is kept, in plain tokens: a pass is
made only if the answer would stay within 3 % of plain decoding even if all its guesses were wrong;
gains may be risked. An answer may first lose one short draft, or two when the drafter is sure. A
longer draft must leave enough for a short one after it, so that one failure does not end drafting.
The time for a draft model to read the text may take 3 % of the time that prompt and answer took so
far.
"""

from llmcli.runtime.drafting.base import Guesses
from llmcli.runtime.drafting.pass_cost import WIDTHS, Curve

MARGIN = 1.05  # expected gain from which a pass is made
SHARE = 0.02  # share of an answer's tokens that may be lost
FIRST = 1.5  # tokens that may be lost at once; more if four wrong rows cost more
SURE = 0.9  # chance of a guess from which FIRST_LOSS_TOKENS counts twice
HICCUP = 1.25  # passes slower than this factor were slowed down by other programs


class Pace:
    """The balance of one answer."""

    def __init__(self, curve: Curve, most: int = WIDTHS[-1]) -> None:
        self.curve, self.most = curve, most
        self.made, self.saved = 0, 0.0
        self.turned = False  # whether the last pass had several rows
        self.outlay = 0.0  # plain tokens' worth of reading that the prompt's time allows

    def begin(self, prompt: float) -> None:
        """Record the duration of the prompt in seconds; its last row yielded a token."""
        if not self.made:
            self.made, self.outlay = 1, SHARE * prompt / self.curve.one

    def plain(self, seconds: float) -> None:
        """Record a pass of one row that yielded a token."""
        self.made += 1
        if self.turned:
            self.turned = False
            self.curve.turned(seconds)
        else:
            self.curve.saw(1, seconds)

    def guessed(
        self, rows: int, made: int, seconds: float, drafting: float, reading: float = 0.0
    ) -> None:
        """Record a pass of several rows that yielded `n_tokens` tokens, after `drafting_seconds`,
        `reading_seconds` of them to read the text.
        """
        expected_seconds = min(seconds, HICCUP * self.curve(rows))  # other programs caused the rest
        self.curve.saw(rows, seconds)
        prepaid = min(self.outlay, reading / self.curve.one)
        self.outlay -= prepaid
        self.made += made
        self.saved += made + prepaid - (expected_seconds + drafting) / self.curve.one - self.turning
        self.turned = True

    def choose(self, guesses: Guesses, limit: float) -> int:
        """Return how many tokens to draft, at most `limit`; 0 for none."""
        chances = guesses.chances(int(min(self.most - 1, limit)))
        if not chances or not self.may_read(guesses.reading() / self.curve.one):
            return 0
        best, chosen = MARGIN, 0
        expected, right, counted = 1.0, 1.0, 0
        short = WIDTHS[0]
        again = (
            self.curve.ratio(short) + guesses.cost(short - 1) / self.curve.one - 1 + self.turning
        )
        risk = max(again, FIRST) * (2 if chances[0] >= SURE else 1)
        for width in WIDTHS:
            count = min(width - 1, len(chances))
            for chance in chances[counted:count]:
                right *= chance
                expected += right
            counted = count
            cost = self.curve.hoped(count + 1) + guesses.cost(count) / self.curve.one + self.turning
            if expected > best * cost and self.affords(
                cost if width == short else cost + again, risk
            ):
                best, chosen = expected / cost, count
            if count == len(chances):
                break
        return chosen

    @property
    def turning(self) -> float:
        """Return the cost of switching from single rows to several and back, in plain tokens."""
        return 0.0 if self.turned else self.curve.turn

    def affords(self, cost: float, risk: float) -> bool:
        """Return whether a pass that costs as much as `cost` plain tokens is affordable if it
        yields a single one.
        """
        return self.saved + 1 - cost >= -max(risk, SHARE * self.made)

    def may_read(self, cost: float) -> bool:
        """Return whether reading the text may cost as much as `cost` plain tokens."""
        return not cost or cost <= self.outlay + max(0.0, self.saved) + SHARE * self.made
