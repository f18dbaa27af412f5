"""The results of a load as JSON documents, as tables, and in llama-bench's four formats: md, csv,
json and jsonl.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from llmcli.bench.load.metrics import DEFINITIONS, RANKS, TIMES, Figures
from llmcli.bench.load.mixes import Shape

FORMATS = ("md", "csv", "json", "jsonl")
SHOWN = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class World:
    """The circumstances of a load: server, model, prompts, limits, build, processor, time and
    seed.
    """

    server: str
    model: str
    mix: str
    shape: Shape
    endpoint: str
    slo: str
    build: str
    cpu: str
    began: str
    seed: int


def title(world: World, told: Figures) -> str:
    """Return the name of the test for the history."""
    lengths = (
        f"{world.shape.prompt}+{world.shape.output}"
        if world.mix in ("fixed", "sonnet")
        else world.mix
    )
    return f"load {lengths} {told.load.name}"


def document(world: World, told: Figures) -> dict[str, Any]:
    """Return one result row. Field names follow vLLM's `bench serve` and llama-bench; times are in
    milliseconds.
    """
    load, shape = told.load, world.shape
    times = {
        name: None
        if (summary := told.times.get(name)) is None
        else {"count": summary.count, "mean": summary.mean, "max": summary.most, **summary.ranks}
        for name in TIMES
    }
    return {
        "test": title(world, told),
        "build_commit": world.build,
        "cpu_info": world.cpu,
        "gpu_info": "",
        "backends": "http",
        "model_filename": world.model,
        "server": world.server,
        "endpoint": world.endpoint,
        "test_time": world.began,
        "load": load.name,
        "arrivals": load.arrivals,
        "level": load.level,
        "n_parallel": int(load.level) if load.closed else 0,
        "mix": world.mix,
        "seed": world.seed,
        "n_prompt": shape.prompt,
        "n_gen": shape.output,
        "n_depth": 0,
        "sampling": True,
        "shared": shape.shared,
        "cancel": shape.cancel,
        "duration": told.seconds,
        "completed": told.answered,
        "failed": sum(told.failed.values()),
        "failed_by_kind": told.failed,
        "failed_says": told.says,
        "cancelled": told.cancelled,
        "prompt_tokens_mean": _known(told.prompt_tokens),
        "output_tokens_mean": _known(told.output_tokens),
        "cached_share": told.cached,
        "request_throughput": told.request_rate,
        "output_throughput": told.output_rate,
        "total_token_throughput": told.total_rate,
        "slo": world.slo or None,
        "request_goodput": told.goodput,
        "slo_share": told.share,
        **{f"{name}_ms": summary for name, summary in times.items()},
        "bundled_share": told.bundled,
        "client_late_p50_ms": told.late_ms[0],
        "client_late_p99_ms": told.late_ms[1],
        "client_cpu_share": told.client,
        "saturated": told.saturated,
        "stopped_early": told.stopped,
        "samples_ts": [round(rate, 4) for rate in told.samples],
        "samples_ns": [round(told.seconds * 1e9 / len(told.samples))] * len(told.samples),
    }


def text(rows: Sequence[dict[str, Any]], form: str) -> str:
    """Format all rows in one of the OUTPUT_FORMATS except md."""
    if form == "json":
        return json.dumps(rows, indent=2, allow_nan=False)
    if form == "jsonl":
        return "\n".join(json.dumps(row, allow_nan=False) for row in rows)
    flat = [_flat(row) for row in rows]
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    out.write(",".join(flat[0]) + "\n")
    writer.writerows(row.values() for row in flat)
    return out.getvalue().rstrip("\n")


def table(
    found: Sequence[Figures],
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """Return columns, rows, and right-aligned columns of the table with one row per load."""
    has_slo = any(metrics.goodput is not None for metrics in found)
    columns = (
        "load",
        "answered",
        "failed",
        "output tok/s",
        "total tok/s",
        "requests/s",
        *(f"{name} {rank}" for name in TIMES for rank in SHOWN),
        *(("goodput", "kept") if has_slo else ()),
    )
    rows = [
        (
            metrics.load.name,
            str(metrics.answered),
            str(sum(metrics.failed.values())),
            f"{metrics.output_rate:.1f}",
            f"{metrics.total_rate:.1f}",
            f"{metrics.request_rate:.2f}",
            *(cell(metrics, name, rank) for name in TIMES for rank in SHOWN),
            *((f"{metrics.goodput or 0:.2f}", f"{metrics.share or 0:.0%}") if has_slo else ()),
        )
        for metrics in found
    ]
    return columns, rows, columns[1:]


def times(one: Figures) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """Return columns, rows, and right-aligned columns of all percentiles of one load in
    milliseconds; - for too few values.
    """
    columns = ("ms", "values", "mean", *RANKS, "max")
    rows = [
        (
            name.upper(),
            f"{summary.count:,}",
            f"{summary.mean:.1f}",
            *(cell(one, name, rank) for rank in RANKS),
            f"{summary.most:.1f}",
        )
        for name, summary in one.times.items()
    ]
    return columns, rows, columns[1:]


def cell(one: Figures, name: str, rank: str) -> str:
    """Format a percentile for a table."""
    summary = one.times.get(name)
    value = summary.ranks[rank] if summary else None
    return "-" if value is None else f"{value:.1f}"


def definitions() -> list[str]:
    """Return the definition of each metric as one line."""
    return [f"{name}: {meaning}" for name, meaning in DEFINITIONS.items()]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without lists and nested objects: p50 of ttft_ms becomes ttft_p50_ms."""
    flat_row: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("samples_ts", "samples_ns", "failed_says"):
            continue
        if name.endswith("_ms") and name[:-3] in TIMES:
            flat_row[f"{name[:-3]}_count"] = (value or {}).get("count")
            for rank in ("mean", "max", *RANKS):
                flat_row[f"{name[:-3]}_{rank}_ms"] = (value or {}).get(rank)
        elif name == "failed_by_kind":
            flat_row[name] = "; ".join(f"{kind}: {count}" for kind, count in value.items())
        else:
            flat_row[name] = int(value) if isinstance(value, bool) else value
    return flat_row


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
