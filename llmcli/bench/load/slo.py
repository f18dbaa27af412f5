"""Service level objectives: limits that the latencies of a server should not exceed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcli.bench.load.records import LoadAnswer
from llmcli.errors import UserError

SLO_METRICS = ("ttft", "tpot", "e2el")
SLO_HINT = "--slo ttft:2000,tpot:100 (milliseconds; also e2el)"


@dataclass(frozen=True, slots=True)
class Slo:
    """The latency limits of each request: for some of SLO_METRICS the maximum in milliseconds."""

    limits: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{name}:{most:g}" for name, most in self.limits.items())

    def is_met_by(self, answer: LoadAnswer) -> bool:
        """Return whether an answer is within all limits."""
        return self.worst_ratio(answer) <= 1

    def worst_ratio(self, answer: LoadAnswer) -> float:
        """Return the largest ratio of a measured time to its limit; infinity for a failed answer.
        An answer with a single token has no time per output token, which then counts as 0.
        """
        if not answer.is_complete:
            return math.inf
        seconds = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.e2el}
        return max(seconds[name] * 1e3 / most for name, most in self.limits.items())


def parse_slo(text: str) -> Slo:
    """Parse the value of --slo. Raises UserError."""
    limits: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition(":")
        try:
            most = float(number)
        except ValueError:
            most = -1.0
        if name not in SLO_METRICS or not 0 < most < 1e12:
            raise UserError(f"--slo: invalid limit {word!r}", hint=SLO_HINT)
        limits[name] = most
    if not limits:
        raise UserError("--slo contains no limit", hint=SLO_HINT)
    return Slo(limits)
