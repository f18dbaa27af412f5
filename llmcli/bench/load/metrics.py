"""From answers to figures, each as DEFINITIONS says. Percentiles are nearest-rank, as everywhere in
llmcli.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from llmcli.bench.load.generator import Load, Run
from llmcli.bench.load.records import Answer
from llmcli.bench.load.slo import Slo
from llmcli.runtime.requests.request import percentile

# Each percentile, and the values below which it would be one of the last few: then there is none.
RANKS = {
    "p50": (0.5, 1),
    "p90": (0.9, 10),
    "p95": (0.95, 20),
    "p99": (0.99, 100),
    "p99.9": (0.999, 1000),
}
TIMES = ("ttft", "tpot", "itl", "e2el")
BEHIND = 0.010  # seconds of lateness of the client (p99) from which it is said to have disturbed
BUSY = 0.7  # of one CPU: a client near one core may have been what limits
DEFINITIONS = {
    "ttft": "time to first token: request due (closed loop: sent) to its first text, queueing and prefill included",
    "tpot": "time per output token: (last text - first text) / (output tokens - 1), one value a request",
    "itl": "inter-token latency: the gaps between arrivals of text, those of all requests pooled",
    "e2el": "end-to-end latency: request due to its last byte",
    "output tok/s": "tokens that arrived while it was measured, of all requests, by the measured seconds",
    "total tok/s": "the same, and the prompt tokens of the requests whose first text arrived in that time",
    "requests/s": "requests that ended well while it was measured, by the measured seconds",
    "goodput": "measured requests that kept every promise of --slo, a second; failed ones keep none",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds of one kind of time. A percentile is None where too few values would make it."""

    count: int
    mean: float
    most: float
    ranks: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one load gave. `answered`, `failed` (by kind, with an example) and `cancelled` are the
    measured requests; `kept` of them kept the promise. `bundled` is the share of tokens that came
    in chunks with others: their gaps are those of the chunks. `cached` is the share of prompt
    tokens that the server had computed before, None: not told. `late_ms` is the client's own
    lateness (p50, p99), `client` its share of a CPU; `samples` are the output tokens a second of
    each repetition.
    """

    load: Load
    seconds: float
    answered: int
    cancelled: int
    failed: dict[str, int]
    says: dict[str, str]
    prompt_tokens: float
    output_tokens: float
    cached: float | None
    output_rate: float
    total_rate: float
    request_rate: float
    kept: int | None
    times: dict[str, Spread]
    bundled: float
    late_ms: tuple[float, float]
    client: float
    saturated: bool
    stopped: bool
    samples: tuple[float, ...]

    @property
    def requests(self) -> int:
        """All that were measured, but for those whose client went away."""
        return self.answered + sum(self.failed.values())

    @property
    def goodput(self) -> float | None:
        """Requests a second that kept the promise."""
        return None if self.kept is None or not self.seconds else self.kept / self.seconds

    @property
    def share(self) -> float | None:
        """The share of the requests that kept the promise."""
        return None if self.kept is None else self.kept / max(1, self.requests)

    @property
    def doubts(self) -> list[str]:
        """What a reader should know before believing the times."""
        found = []
        if self.late_ms[1] > BEHIND * 1e3:
            found.append(
                f"the client itself was late by {self.late_ms[1]:.1f} ms (p99): times are too long by as much"
            )
        if self.client > BUSY:
            found.append(f"the client used {self.client:.0%} of a CPU: it may be what limits")
        if self.bundled > 0.05:
            found.append(
                f"{self.bundled:.0%} of the tokens came bundled: ITL is between chunks, TPOT by usage"
            )
        if self.saturated:
            found.append(
                "requests came faster than they were answered: waits grew to the end, longer runs wait longer"
            )
        return found


def spread(values: Sequence[float]) -> Spread | None:
    """Seconds as a Spread; None where there are none."""
    if not values:
        return None
    ms = [value * 1e3 for value in values]
    ranks = {
        name: percentile(ms, share) if len(ms) >= least else None
        for name, (share, least) in RANKS.items()
    }
    return Spread(len(ms), fmean(ms), max(ms), ranks)


def figures(runs: Sequence[Run], slo: Slo | None = None) -> Figures:
    """All figures of one load, which may have been run several times: times are pooled, rates are
    over all seconds.
    """
    measured = [one for run in runs for one in run.measured]
    good = [one for one in measured if one.good]
    failed = Counter(one.error for one in measured if one.error)
    seconds = max(sum(run.ended - run.began for run in runs), 1e-9)
    output, prompts, ended = (
        sum(column) for column in zip(*(_inside(run) for run in runs), strict=True)
    )
    times = {name: spread(seconds_of(name, good)) for name in TIMES}
    tokens = sum(one.tokens for one in good)
    known = [one for one in good if one.prompt_tokens and one.cached_tokens is not None]
    late = [value * 1e3 for run in runs for value in run.late]
    return Figures(
        runs[0].load,
        seconds,
        len(good),
        sum(one.cancelled for one in measured),
        {kind: count for kind, count in failed.most_common() if kind},
        {one.error: one.says for one in measured if one.error and one.says},
        _mean([one.prompt_tokens for one in good]),
        _mean([one.tokens for one in good]),
        sum(one.cached_tokens or 0 for one in known) / sum(one.prompt_tokens or 0 for one in known)
        if known
        else None,
        output / seconds,
        (output + prompts) / seconds,
        ended / seconds,
        None if slo is None else sum(slo.keeps(one) for one in measured),
        {name: told for name, told in times.items() if told},
        max(0.0, 1 - sum(len(one.stamps) for one in good) / tokens) if tokens else 0.0,
        (percentile(late, 0.5), percentile(late, 0.99)),
        sum(run.cpu for run in runs) / seconds,
        any(run.saturated for run in runs),
        any(run.stopped for run in runs),
        tuple(_inside(run)[0] / max(run.ended - run.began, 1e-9) for run in runs),
    )


def seconds_of(name: str, good: Sequence[Answer]) -> list[float]:
    """One of TIMES of answers that were answered to their end."""
    match name:
        case "ttft":
            return [one.ttft for one in good]
        case "tpot":
            return [one.tpot for one in good if one.tpot is not None]
        case "itl":
            return [gap for one in good for gap in one.gaps]
        case _:
            return [one.e2el for one in good]


def _inside(run: Run) -> tuple[float, float, float]:
    """What came while it was measured: output tokens, prompt tokens of answers that began, answers
    that ended.
    """
    began, ended = run.began, run.ended
    prompts = sum(
        one.prompt_tokens or 0
        for one in run.answers
        if one.stamps and began <= one.stamps[0] <= ended
    )
    done = sum(
        one.good and one.ended is not None and began <= one.ended <= ended for one in run.answers
    )
    return sum(_arrived(one, began, ended) for one in run.answers), prompts, done


def _arrived(answer: Answer, began: float, ended: float) -> float:
    """Tokens of an answer that arrived in between: where the server counted others than we did, its
    count by share.
    """
    seen = sum(
        count
        for at, count in zip(answer.stamps, answer.counts, strict=True)
        if began <= at <= ended
    )
    whole = sum(answer.counts)
    return seen * answer.tokens / whole if whole else 0.0


def _mean(values: Sequence[int | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan
