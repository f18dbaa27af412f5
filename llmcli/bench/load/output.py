"""The results of load tests as JSON documents, as tables, and in llama-bench's four formats: md,
csv, json and jsonl.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from llmcli.bench.load.metrics import METRIC_DEFINITIONS, PERCENTILES, TIME_METRICS, LoadMetrics
from llmcli.bench.load.mixes import RequestLengths
from llmcli.bench.result_rows import format_csv, format_json, format_json_lines
from llmcli.charts.chart import Table

TABLE_PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class LoadEnvironment:
    """The conditions of a load test on one server, as they appear in the results. `build`: the
    software that sent the requests. `cpu`: the name of the client's processor.
    """

    server: str
    model: str
    mix: str
    lengths: RequestLengths
    endpoint: str
    slo: str
    build: str
    cpu: str
    start_time: str
    seed: int


def test_title(environment: LoadEnvironment, metrics: LoadMetrics) -> str:
    """Return the name under which the history stores the test, such as "load 512+128 8 at once"."""
    lengths = (
        f"{environment.lengths.prompt_tokens}+{environment.lengths.output_tokens}"
        if environment.mix in ("fixed", "sonnet")
        else environment.mix
    )
    return f"load {lengths} {metrics.load.name}"


def build_row(environment: LoadEnvironment, metrics: LoadMetrics) -> dict[str, Any]:
    """Return the result of one load as a JSON object. Field names follow vLLM's `bench serve` and
    llama-bench. Times are in milliseconds.
    """
    load, shape = metrics.load, environment.lengths
    times = {
        name: None
        if (summary := metrics.times.get(name)) is None
        else {
            "count": summary.count,
            "mean": summary.mean,
            "max": summary.largest,
            **summary.percentiles,
        }
        for name in TIME_METRICS
    }
    return {
        "test": test_title(environment, metrics),
        "build_commit": environment.build,
        "cpu_info": environment.cpu,
        "gpu_info": "",
        "backends": "http",
        "model_filename": environment.model,
        "server": environment.server,
        "endpoint": environment.endpoint,
        "test_time": environment.start_time,
        "load": load.name,
        "arrivals": load.arrivals,
        "level": load.level,
        "n_parallel": int(load.level) if load.is_closed else 0,
        "mix": environment.mix,
        "seed": environment.seed,
        "n_prompt": shape.prompt_tokens,
        "n_gen": shape.output_tokens,
        "n_depth": 0,
        "sampling": True,
        "shared": shape.shared_fraction,
        "cancel": shape.cancelled_fraction,
        "duration": metrics.seconds,
        "completed": metrics.answered,
        "failed": sum(metrics.failed.values()),
        "failed_by_kind": metrics.failed,
        "failed_says": metrics.error_examples,
        "cancelled": metrics.cancelled,
        "prompt_tokens_mean": _known(metrics.prompt_tokens),
        "output_tokens_mean": _known(metrics.output_tokens),
        "cached_share": metrics.cached_share,
        "request_throughput": metrics.request_rate,
        "output_throughput": metrics.output_rate,
        "total_token_throughput": metrics.total_rate,
        "slo": environment.slo or None,
        "request_goodput": metrics.goodput,
        "slo_share": metrics.slo_share,
        **{f"{name}_ms": summary for name, summary in times.items()},
        "bundled_share": metrics.bundled_share,
        "client_late_p50_ms": metrics.late_ms[0],
        "client_late_p99_ms": metrics.late_ms[1],
        "client_cpu_share": metrics.client_cpu,
        "saturated": metrics.saturated,
        "stopped_early": metrics.stopped,
        "samples_ts": [round(rate, 4) for rate in metrics.repetition_rates],
        "samples_ns": [round(metrics.seconds * 1e9 / len(metrics.repetition_rates))]
        * len(metrics.repetition_rates),
    }


def format_rows(rows: Sequence[dict[str, Any]], output_format: str) -> str:
    """Format the rows as "json", "jsonl" or "csv" (`output_format`)."""
    if output_format == "json":
        return format_json(rows)
    if output_format == "jsonl":
        return format_json_lines(rows)
    return format_csv([_flat(row) for row in rows])


def build_table(loads: Sequence[LoadMetrics]) -> Table:
    """Build the table with one row per load."""
    has_slo = any(metrics.goodput is not None for metrics in loads)
    columns = (
        "load",
        "answered",
        "failed",
        "output tok/s",
        "total tok/s",
        "requests/s",
        *(f"{name} {rank}" for name in TIME_METRICS for rank in TABLE_PERCENTILES),
        *(("goodput", "kept") if has_slo else ()),
    )
    rows = tuple(
        (
            metrics.load.name,
            str(metrics.answered),
            str(sum(metrics.failed.values())),
            f"{metrics.output_rate:.1f}",
            f"{metrics.total_rate:.1f}",
            f"{metrics.request_rate:.2f}",
            *(
                format_percentile(metrics, name, rank)
                for name in TIME_METRICS
                for rank in TABLE_PERCENTILES
            ),
            *((f"{metrics.goodput or 0:.2f}", f"{metrics.slo_share or 0:.0%}") if has_slo else ()),
        )
        for metrics in loads
    )
    return Table(columns, rows, frozenset(range(1, len(columns))))


def build_percentile_table(metrics: LoadMetrics) -> Table:
    """Build the table of all percentiles of one load in milliseconds. "-" means that there are too
    few values.
    """
    columns = ("ms", "values", "mean", *PERCENTILES, "max")
    rows = tuple(
        (
            name.upper(),
            f"{summary.count:,}",
            f"{summary.mean:.1f}",
            *(format_percentile(metrics, name, rank) for rank in PERCENTILES),
            f"{summary.largest:.1f}",
        )
        for name, summary in metrics.times.items()
    )
    return Table(columns, rows, frozenset(range(1, len(columns))))


def format_percentile(metrics: LoadMetrics, name: str, rank: str) -> str:
    """Format a percentile in milliseconds for a table. `name`: one of TIME_METRICS. `rank`: a key
    of PERCENTILES.
    """
    summary = metrics.times.get(name)
    value = summary.percentiles[rank] if summary else None
    return "-" if value is None else f"{value:.1f}"


def definition_lines() -> list[str]:
    """Return the definition of each metric as one line."""
    return [f"{name}: {meaning}" for name, meaning in METRIC_DEFINITIONS.items()]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row in a form that CSV can contain: without its lists, and with nested objects
    replaced by single fields, such as ttft_p50_ms for the p50 in ttft_ms.
    """
    flat_row: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("samples_ts", "samples_ns", "failed_says"):
            continue
        if name.endswith("_ms") and name[:-3] in TIME_METRICS:
            flat_row[f"{name[:-3]}_count"] = (value or {}).get("count")
            for rank in ("mean", "max", *PERCENTILES):
                flat_row[f"{name[:-3]}_{rank}_ms"] = (value or {}).get(rank)
        elif name == "failed_by_kind":
            flat_row[name] = "; ".join(f"{kind}: {count}" for kind, count in value.items())
        else:
            flat_row[name] = value
    return flat_row


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
