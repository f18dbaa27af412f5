"""What a load gave as a document, and as llama-bench's four forms: md, csv, json, jsonl."""

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
    """What a row of figures holds for: the server and its model as they were named, what was asked,
    and when.
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
    """The name of a test, as the history lists it."""
    lengths = (
        f"{world.shape.prompt}+{world.shape.output}"
        if world.mix in ("fixed", "sonnet")
        else world.mix
    )
    return f"load {lengths} {told.load.name}"


def document(world: World, told: Figures) -> dict[str, Any]:
    """One row: its names where vLLM's `bench serve` and llama-bench have them are theirs; times in
    milliseconds.
    """
    load, shape = told.load, world.shape
    times = {
        name: None
        if (one := told.times.get(name)) is None
        else {"count": one.count, "mean": one.mean, "max": one.most, **one.ranks}
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
        **{f"{name}_ms": one for name, one in times.items()},
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
    """All rows in one of FORMATS but md."""
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
    """Columns, rows, and those to the right: one row a load."""
    promised = any(one.goodput is not None for one in found)
    columns = (
        "load",
        "answered",
        "failed",
        "output tok/s",
        "total tok/s",
        "requests/s",
        *(f"{name} {rank}" for name in TIMES for rank in SHOWN),
        *(("goodput", "kept") if promised else ()),
    )
    rows = [
        (
            one.load.name,
            str(one.answered),
            str(sum(one.failed.values())),
            f"{one.output_rate:.1f}",
            f"{one.total_rate:.1f}",
            f"{one.request_rate:.2f}",
            *(cell(one, name, rank) for name in TIMES for rank in SHOWN),
            *((f"{one.goodput or 0:.2f}", f"{one.share or 0:.0%}") if promised else ()),
        )
        for one in found
    ]
    return columns, rows, columns[1:]


def times(one: Figures) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """Columns and rows of all percentiles of one load, in milliseconds; - is one that too few
    values would make.
    """
    columns = ("ms", "values", "mean", *RANKS, "max")
    rows = [
        (
            name.upper(),
            f"{told.count:,}",
            f"{told.mean:.1f}",
            *(cell(one, name, rank) for rank in RANKS),
            f"{told.most:.1f}",
        )
        for name, told in one.times.items()
    ]
    return columns, rows, columns[1:]


def cell(one: Figures, name: str, rank: str) -> str:
    """A percentile as a table has it."""
    told = one.times.get(name)
    value = told.ranks[rank] if told else None
    return "-" if value is None else f"{value:.1f}"


def definitions() -> list[str]:
    """What the figures are, a line each."""
    return [f"{name}: {meaning}" for name, meaning in DEFINITIONS.items()]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row without lists and nests: p50 of ttft_ms is ttft_p50_ms."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("samples_ts", "samples_ns", "failed_says"):
            continue
        if name.endswith("_ms") and name[:-3] in TIMES:
            found[f"{name[:-3]}_count"] = (value or {}).get("count")
            for rank in ("mean", "max", *RANKS):
                found[f"{name[:-3]}_{rank}_ms"] = (value or {}).get(rank)
        elif name == "failed_by_kind":
            found[name] = "; ".join(f"{kind}: {count}" for kind, count in value.items())
        else:
            found[name] = int(value) if isinstance(value, bool) else value
    return found


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
