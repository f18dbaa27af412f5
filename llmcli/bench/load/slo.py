"""Service level objectives: upper limits of the latencies of each request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcli.bench.load.records import LoadAnswer
from llmcli.errors import UserError

SLO_METRICS = ("ttft", "ttfo", "tpot", "e2el")
SLO_HINT = "--slo ttft:2000,tpot:100 (milliseconds; also ttfo and e2el)"


@dataclass(frozen=True, slots=True)
class Slo:
    """The latency limits of each request. `limits`: the maximum in milliseconds by metric name, for
    some of SLO_METRICS.
    """

    limits: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{name}:{limit:g}" for name, limit in self.limits.items())

    def is_met_by(self, answer: LoadAnswer) -> bool:
        """Return whether an answer is within all limits."""
        return self.worst_ratio(answer) <= 1

    def worst_ratio(self, answer: LoadAnswer) -> float:
        """Return the largest ratio of a measured time to its limit; infinity for a failed answer.
        For an answer with a single token, the time per output token counts as 0. An answer that only
        thinks exceeds every limit of ttfo.
        """
        if not answer.is_complete:
            return math.inf
        ttfo = math.inf if answer.ttfo is None else answer.ttfo
        seconds = {
            "ttft": answer.ttft,
            "ttfo": ttfo,
            "tpot": answer.tpot or 0.0,
            "e2el": answer.e2el,
        }
        return max(seconds[name] * 1e3 / limit for name, limit in self.limits.items())


def parse_slo(text: str) -> Slo:
    """Parse the value of --slo, such as "ttft:2000,tpot:100". Raises UserError."""
    limits: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in SLO_METRICS or not 0 < limit < 1e12:
            raise UserError(f"--slo: invalid limit {word!r}", hint=SLO_HINT)
        limits[name] = limit
    if not limits:
        raise UserError("--slo contains no limit", hint=SLO_HINT)
    return Slo(limits)
