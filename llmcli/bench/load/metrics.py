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
MAX_LATE_SECONDS = (
    0.010  # seconds of lateness of the client (p99) from which its results are doubtful
)
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
    measured = [answer for run in runs for answer in run.measured_answers]
    complete = [answer for answer in measured if answer.is_complete]
    failures = Counter(answer.error for answer in measured if answer.error)
    error_examples = {
        answer.error: answer.error_message
        for answer in measured
        if answer.error and answer.error_message
    }
    arrivals = [_count_arrivals(run) for run in runs]
    seconds = max(sum(run.ended - run.began for run in runs), 1e-9)
    output_tokens = sum(arrival.output_tokens for arrival in arrivals)
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    summaries = {name: summarize_times(metric_seconds(name, complete)) for name in TIME_METRICS}
    late_ms = [late * 1e3 for run in runs for late in run.lateness]
    return LoadMetrics(
        load=runs[0].load,
        seconds=seconds,
        answered=len(complete),
        cancelled=sum(answer.cancelled for answer in measured),
        failed={kind: count for kind, count in failures.most_common() if kind},
        error_examples=error_examples,
        prompt_tokens=_mean([answer.prompt_tokens for answer in complete]),
        output_tokens=_mean([answer.tokens for answer in complete]),
        cached_share=_cached_share(complete),
        output_rate=output_tokens / seconds,
        total_rate=(output_tokens + prompt_tokens) / seconds,
        request_rate=sum(arrival.answers for arrival in arrivals) / seconds,
        kept_slo=None if slo is None else sum(slo.is_met_by(answer) for answer in measured),
        times={name: summary for name, summary in summaries.items() if summary},
        bundled_share=_bundled_share(complete),
        late_ms=(percentile(late_ms, 0.5), percentile(late_ms, 0.99)),
        client_cpu=sum(run.cpu_seconds for run in runs) / seconds,
        saturated=any(run.is_saturated for run in runs),
        stopped=any(run.was_stopped for run in runs),
        repetition_rates=tuple(
            arrival.output_tokens / max(run.ended - run.began, 1e-9)
            for run, arrival in zip(runs, arrivals, strict=True)
        ),
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


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """What arrived during a measurement: output tokens, prompt tokens of answers that began, and
    answers that ended.
    """

    output_tokens: float
    prompt_tokens: int
    answers: int


def _count_arrivals(run: LoadRun) -> _Arrivals:
    began, ended = run.began, run.ended
    output_tokens = sum(_arrived_tokens(answer, began, ended) for answer in run.answers)
    prompt_tokens = sum(
        answer.prompt_tokens or 0
        for answer in run.answers
        if answer.arrival_times and began <= answer.arrival_times[0] <= ended
    )
    n_answers = sum(
        answer.is_complete and answer.ended is not None and began <= answer.ended <= ended
        for answer in run.answers
    )
    return _Arrivals(output_tokens, prompt_tokens, n_answers)


def _arrived_tokens(answer: LoadAnswer, began: float, ended: float) -> float:
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


def _cached_share(answers: Sequence[LoadAnswer]) -> float | None:
    """Return the share of prompt tokens that the server had cached; None if it reports none."""
    counted = [
        (answer.cached_tokens, answer.prompt_tokens)
        for answer in answers
        if answer.prompt_tokens and answer.cached_tokens is not None
    ]
    if not counted:
        return None
    return sum(cached for cached, _ in counted) / sum(prompt for _, prompt in counted)


def _bundled_share(answers: Sequence[LoadAnswer]) -> float:
    """Return the share of tokens that arrived in a chunk with others."""
    tokens = sum(answer.tokens for answer in answers)
    chunks = sum(len(answer.arrival_times) for answer in answers)
    return max(0.0, 1 - chunks / tokens) if tokens else 0.0


def _mean(values: Sequence[int | None]) -> float:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else math.nan
