"""The metrics of a load, computed from the recorded answers. METRIC_DEFINITIONS defines them.
Percentiles are nearest-rank values.
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

# For each percentile: its rank, and the minimum number of values. With fewer values, a high
# percentile would simply be one of the largest values.
PERCENTILES = {
    "p50": (0.5, 1),
    "p90": (0.9, 10),
    "p95": (0.95, 20),
    "p99": (0.99, 100),
    "p99.9": (0.999, 1000),
}
TIME_METRICS = ("ttft", "ttfo", "tpot", "itl", "e2el")
MAX_LATE_SECONDS = 0.010  # if the client's event loop is later (p99), the results are doubtful
# share of one CPU; if the client uses more, the client itself may limit the measured speed
MAX_CLIENT_CPU = 0.7
METRIC_DEFINITIONS = {
    "ttft": "time to first token: from the due time (closed loop: sending) to the first text, "
    "including queueing and prefill",
    "ttfo": "time to first answer token: from the due time to the first text that is not thinking",
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
    """One latency metric over all requests, in milliseconds. A percentile is None if there are too
    few values for it (see PERCENTILES).
    """

    count: int
    mean: float
    largest: float
    percentiles: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The metrics of one load.

    `answered`, `failed` and `cancelled` count measured requests. `failed` has a count and
    `error_examples` a message for each kind of error. `kept_slo`: number of measured requests
    within the latency limits; None without limits. `prompt_tokens`, `output_tokens`: means per
    request. `cached_share`: share of the prompt tokens that the server took from its cache; None:
    unknown. `bundled_share`: share of the tokens that arrived in one chunk together with an earlier
    token, so that their own arrival times are unknown. `late_ms`: how late the client's event loop
    was (p50, p99). `client_cpu`: share of one CPU that the client used. `repetition_rates`: output
    tokens per second of each repetition.
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
        """The number of measured requests that were not canceled."""
        return self.answered + sum(self.failed.values())

    @property
    def goodput(self) -> float | None:
        """Requests per second that were within the latency limits; None without limits."""
        return None if self.kept_slo is None or not self.seconds else self.kept_slo / self.seconds

    @property
    def slo_share(self) -> float | None:
        """The share of the requests that were within the latency limits; None without limits."""
        return None if self.kept_slo is None else self.kept_slo / max(1, self.requests)

    @property
    def warnings(self) -> list[str]:
        """Sentences with reasons to doubt the measured times."""
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
    """Summarize times given in seconds; None if there are no times."""
    if not values:
        return None
    ms = [value * 1e3 for value in values]
    ranks = {
        name: percentile(ms, share) if len(ms) >= min_count else None
        for name, (share, min_count) in PERCENTILES.items()
    }
    return TimeSummary(len(ms), fmean(ms), max(ms), ranks)


def compute_metrics(runs: Sequence[LoadRun], slo: Slo | None = None) -> LoadMetrics:
    """Compute the metrics of one load from one or several runs. Percentiles are taken over the
    requests of all runs. Rates are totals divided by the total seconds. `slo`: the latency limits;
    None: no limits.
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


def metric_seconds(name: str, answers: Sequence[LoadAnswer]) -> list[float]:
    """Return all values of one of TIME_METRICS in seconds. The answers must be complete."""
    match name:
        case "ttft":
            return [answer.ttft for answer in answers]
        case "ttfo":
            return [answer.ttfo for answer in answers if answer.ttfo is not None]
        case "tpot":
            return [answer.tpot for answer in answers if answer.tpot is not None]
        case "itl":
            return [gap for answer in answers for gap in answer.gaps]
        case _:
            return [answer.e2el for answer in answers]


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """What arrived during a run: the number of output tokens, the prompt tokens of answers whose
    first text arrived, and the number of answers that ended.
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
    """Return the number of an answer's tokens that arrived between the times `began` and `ended`.
    If the server's token count differs from the sum over the chunks, the server's count is divided
    in proportion to the chunks.
    """
    arrived = sum(
        count
        for time, count in zip(answer.arrival_times, answer.token_counts, strict=True)
        if began <= time <= ended
    )
    total = sum(answer.token_counts)
    return arrived * answer.tokens / total if total else 0.0


def _cached_share(answers: Sequence[LoadAnswer]) -> float | None:
    """Return the share of the prompt tokens that the server took from its cache; None if the server
    does not report cached tokens.
    """
    counted = [
        (answer.cached_tokens, answer.prompt_tokens)
        for answer in answers
        if answer.prompt_tokens and answer.cached_tokens is not None
    ]
    if not counted:
        return None
    return sum(cached for cached, _ in counted) / sum(prompt for _, prompt in counted)


def _bundled_share(answers: Sequence[LoadAnswer]) -> float:
    """Return the share of the tokens that arrived in one chunk together with an earlier token."""
    tokens = sum(answer.tokens for answer in answers)
    chunks = sum(len(answer.arrival_times) for answer in answers)
    return max(0.0, 1 - chunks / tokens) if tokens else 0.0


def _mean(values: Sequence[int | None]) -> float:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else math.nan
