"""A promise to users: how long they may wait, and for how many of them it must hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcli.bench.load.records import Answer
from llmcli.errors import UserError

NAMES = ("ttft", "tpot", "e2el")
HINT = "--slo ttft:2000,tpot:100 (milliseconds; also e2el)"


@dataclass(frozen=True, slots=True)
class Slo:
    """The most milliseconds of each of NAMES that is promised."""

    limits: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{name}:{most:g}" for name, most in self.limits.items())

    def keeps(self, answer: Answer) -> bool:
        """Whether an answer kept all of it."""
        return self.ratio(answer) <= 1

    def ratio(self, answer: Answer) -> float:
        """What it met in units of the limit, of the limits the one it is worst in; inf where it
        failed. An answer of one token has a TPOT of 0.
        """
        if not answer.good:
            return math.inf
        met = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.e2el}
        return max(met[name] * 1e3 / most for name, most in self.limits.items())


def parse(text: str) -> Slo:
    """The promise that was typed. Raises UserError."""
    limits: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition(":")
        try:
            most = float(number)
        except ValueError:
            most = -1.0
        if name not in NAMES or not 0 < most < 1e12:
            raise UserError(f"--slo does not know {word!r}", hint=HINT)
        limits[name] = most
    if not limits:
        raise UserError("--slo promises nothing", hint=HINT)
    return Slo(limits)
