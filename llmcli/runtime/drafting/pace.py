"""How many tokens to guess: as many as pay, and never more than the answer can afford to lose.

A pass of m rows that makes k tokens in place of k passes of one row pays where k > T(m) / T(1)
(Leviathan et al. 2023, with a measured cost). The expected k comes from the drafter's chances, the
cost from the curve. Chances are estimates, so there is a balance, too: what guessing has saved, in
plain tokens. A pass is made only if the answer would stay within 3% of plain decoding even if all
its guesses were wrong; what is won may be risked. An answer's first loss is one short draft, two
where the drafter is sure. A longer draft must leave enough for a short one after it, so that one
failure does not cost an answer its chance to win. That a draft model reads the text is an outlay,
made where it is within 3% of the time that prompt and answer took so far.
"""

from llmcli.runtime.drafting.base import Guesses
from llmcli.runtime.drafting.curve import WIDTHS, Curve

MARGIN = 1.05  # the expected gain that makes a pass worth its while
SHARE = 0.02  # of an answer's tokens may be lost
FIRST = 1.5  # tokens that may be lost at once, or else what four wrong rows cost
SURE = 0.9  # chance of a guess from which on it may be twice as many
HICCUP = 1.25  # times what a pass should take


class Pace:
    """One answer's balance."""

    def __init__(self, curve: Curve, most: int = WIDTHS[-1]) -> None:
        self.curve, self.most = curve, most
        self.made, self.saved = 0, 0.0
        self.turned = False  # whether the last pass had several rows
        self.outlay = 0.0  # plain tokens' worth of reading that the prompt's time allows

    def begin(self, prompt: float) -> None:
        """The prompt took so many seconds, and its last row made a token."""
        if not self.made:
            self.made, self.outlay = 1, SHARE * prompt / self.curve.one

    def plain(self, seconds: float) -> None:
        """A pass of one row made a token."""
        self.made += 1
        if self.turned:
            self.turned = False
            self.curve.turned(seconds)
        else:
            self.curve.saw(1, seconds)

    def guessed(
        self, rows: int, made: int, seconds: float, drafting: float, reading: float = 0.0
    ) -> None:
        """A pass of several rows made `made` tokens, after `drafting` seconds, `reading` of them to
        read the text.
        """
        usual = min(seconds, HICCUP * self.curve(rows))  # what is beyond was another program's
        self.curve.saw(rows, seconds)
        paid = min(self.outlay, reading / self.curve.one)
        self.outlay -= paid
        self.made += made
        self.saved += made + paid - (usual + drafting) / self.curve.one - self.turning
        self.turned = True

    def choose(self, guesses: Guesses, limit: float) -> int:
        """How many tokens to guess, at most `limit`; 0: none."""
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
        """Plain tokens' worth of going from passes of one row to several, and back."""
        return 0.0 if self.turned else self.curve.turn

    def affords(self, cost: float, risk: float) -> bool:
        """Whether a pass that costs as much as `cost` plain tokens may turn out to make a single
        one.
        """
        return self.saved + 1 - cost >= -max(risk, SHARE * self.made)

    def may_read(self, cost: float) -> bool:
        """Whether reading the text may cost as much as `cost` plain tokens."""
        return not cost or cost <= self.outlay + max(0.0, self.saved) + SHARE * self.made
