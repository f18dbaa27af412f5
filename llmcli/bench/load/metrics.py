"""Metrics of a load, computed from its answers as METRIC_DEFINITIONS says. Percentiles are
nearest-rank.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from llmcli.bench.load.generator import Load, LoadRun
from llmcli.bench.load.records import LoadAnswer
from llmcli.bench.load.slo import Slo
from llmcli.runtime.requests.request import percentile

# Each percentile with the minimum number of values: with fewer, it would be one of the largest
# values.
PERCENTILES = {
    "p50": (0.5, 1),
    "p90": (0.9, 10),
    "p95": (0.95, 20),
    "p99": (0.99, 100),
    "p99.9": (0.999, 1000),
}
TIME_METRICS = ("ttft", "tpot", "itl", "e2el")
MAX_LATE_SECONDS = 0.010  # seconds of lateness of the client (p99) from which its results are doubtful
MAX_CLIENT_CPU = 0.7  # of one CPU; above this the client may be the limit
METRIC_DEFINITIONS = {
    "ttft": "time to first token: from the due time (closed loop: sending) to the first text, "
    "including queueing and prefill",
    "tpot": "time per output token: (last text - first text) / (output tokens - 1), one value per "
    "request",
    "itl": "inter-token latency: the gaps between arrivals of text of all requests",
    "e2el": "end-to-end latency: from the due time to the last byte",
    "output tok/s": "tokens of all requests that arrived during the measurement, per second",
    "total tok/s": "output tokens, and the prompt tokens of requests whose first text arrived "
    "during the measurement, per second",
    "requests/s": "requests that were completed during the measurement, per second",
    "goodput": "measured requests within all limits of --slo, per second; failed requests are not",
}


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """Summary of one latency metric in milliseconds. A percentile is None if there are too few
    values.
    """

    count: int
    mean: float
    largest: float
    percentiles: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The metrics of one load.

    `answered`, `failed` (by kind; `error_examples`: a message for each kind) and `cancelled` count
    the measured requests; `kept_slo` of them met the limits. `bundled_share`: share of tokens that
    arrived in chunks with others, whose gaps are those of the chunks. `cached_share`: share of
    prompt tokens that the server had cached, None: unknown. `late_ms`: the client's own lateness
    (p50, p99). `client_cpu`: its share of a CPU. `repetition_rates`: output tokens per second of
    each repetition.
    """

    load: Load
    seconds: float
    answered: int
    cancelled: int
    failed: dict[str, int]
    error_examples: dict[str, str]
    prompt_tokens: float
    output_tokens: float
    cached_share: float | None
    output_rate: float
    total_rate: float
    request_rate: float
    kept_slo: int | None
    times: dict[str, TimeSummary]
    bundled_share: float
    late_ms: tuple[float, float]
    client_cpu: float
    saturated: bool
    stopped: bool
    repetition_rates: tuple[float, ...]

    @property
    def requests(self) -> int:
        """All measured requests except canceled ones."""
        return self.answered + sum(self.failed.values())

    @property
    def goodput(self) -> float | None:
        """Requests per second within the limits."""
        return None if self.kept_slo is None or not self.seconds else self.kept_slo / self.seconds

    @property
    def slo_share(self) -> float | None:
        """The share of the requests within the limits."""
        return None if self.kept_slo is None else self.kept_slo / max(1, self.requests)

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the measured times."""
        warnings = []
        if self.late_ms[1] > MAX_LATE_SECONDS * 1e3:
            warnings.append(
                f"the client was late by {self.late_ms[1]:.1f} ms (p99): times are too long by as"
                " much"
            )
        if self.client_cpu > MAX_CLIENT_CPU:
            warnings.append(f"the client used {self.client_cpu:.0%} of a CPU: it may be the limit")
        if self.bundled_share > 0.05:
            warnings.append(
                f"{self.bundled_share:.0%} of the tokens arrived bundled: ITL is measured between chunks,"
                " TPOT uses the server's token count"
            )
        if self.saturated:
            warnings.append(
                "requests arrived faster than they were answered: waiting times grow with the"
                " length of the run"
            )
        return warnings


def summarize_times(values: Sequence[float]) -> TimeSummary | None:
    """Summarize times in seconds; None if there are none."""
    if not values:
        return None
    ms = [value * 1e3 for value in values]
    ranks = {
        name: percentile(ms, share) if len(ms) >= least else None
        for name, (share, least) in PERCENTILES.items()
    }
    return TimeSummary(len(ms), fmean(ms), max(ms), ranks)


def compute_metrics(runs: Sequence[LoadRun], slo: Slo | None = None) -> LoadMetrics:
    """Compute the metrics of one load, which may have been run several times: times are pooled,
    rates are over the total seconds.
    """
    measured = [one for run in runs for one in run.measured_answers]
    good = [one for one in measured if one.is_complete]
    failed = Counter(one.error for one in measured if one.error)
    seconds = max(sum(run.ended - run.began for run in runs), 1e-9)
    output, prompts, ended = (
        sum(column) for column in zip(*(_inside(run) for run in runs), strict=True)
    )
    times = {name: summarize_times(metric_seconds(name, good)) for name in TIME_METRICS}
    tokens = sum(one.tokens for one in good)
    known = [one for one in good if one.prompt_tokens and one.cached_tokens is not None]
    late = [value * 1e3 for run in runs for value in run.lateness]
    return LoadMetrics(
        runs[0].load,
        seconds,
        len(good),
        sum(one.cancelled for one in measured),
        {kind: count for kind, count in failed.most_common() if kind},
        {one.error: one.error_message for one in measured if one.error and one.error_message},
        _mean([one.prompt_tokens for one in good]),
        _mean([one.tokens for one in good]),
        sum(one.cached_tokens or 0 for one in known) / sum(one.prompt_tokens or 0 for one in known)
        if known
        else None,
        output / seconds,
        (output + prompts) / seconds,
        ended / seconds,
        None if slo is None else sum(slo.is_met_by(one) for one in measured),
        {name: told for name, told in times.items() if told},
        max(0.0, 1 - sum(len(one.arrival_times) for one in good) / tokens) if tokens else 0.0,
        (percentile(late, 0.5), percentile(late, 0.99)),
        sum(run.cpu_seconds for run in runs) / seconds,
        any(run.is_saturated for run in runs),
        any(run.was_stopped for run in runs),
        tuple(_inside(run)[0] / max(run.ended - run.began, 1e-9) for run in runs),
    )


def metric_seconds(name: str, good: Sequence[LoadAnswer]) -> list[float]:
    """Return the seconds of one of TIME_METRICS for complete answers."""
    match name:
        case "ttft":
            return [answer.ttft for answer in good]
        case "tpot":
            return [answer.tpot for answer in good if answer.tpot is not None]
        case "itl":
            return [gap for answer in good for gap in answer.gaps]
        case _:
            return [answer.e2el for answer in good]


def _inside(run: LoadRun) -> tuple[float, float, float]:
    """Return what arrived during the measurement: output tokens, prompt tokens of answers that
    began, and answers that ended.
    """
    began, ended = run.began, run.ended
    prompts = sum(
        answer.prompt_tokens or 0
        for answer in run.answers
        if answer.arrival_times and began <= answer.arrival_times[0] <= ended
    )
    done = sum(
        answer.is_complete and answer.ended is not None and began <= answer.ended <= ended
        for answer in run.answers
    )
    return sum(_arrived(answer, began, ended) for answer in run.answers), prompts, done


def _arrived(answer: LoadAnswer, began: float, ended: float) -> float:
    """Return the tokens of an answer that arrived in the interval. If the server's count differs
    from the chunks', its count is distributed proportionally.
    """
    arrived = sum(
        count
        for time, count in zip(answer.arrival_times, answer.token_counts, strict=True)
        if began <= time <= ended
    )
    total = sum(answer.token_counts)
    return arrived * answer.tokens / total if total else 0.0


def _mean(values: Sequence[int | None]) -> float:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else math.nan
