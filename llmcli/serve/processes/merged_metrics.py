"""Merges the metrics and the cache reports of several replicas.

The sum over all replicas has the name that the metric has on a single server. The values of each
replica are under `llmcli_replica_…{replica="…"}`, so that a query that adds up all samples of one
name counts nothing twice.
"""

import json
from collections.abc import Mapping
from typing import Any

# Metrics that are not summed: for MINIMUM_METRICS the smallest value is used, for MAXIMUM_METRICS
# the largest, for MEAN_METRICS the mean, for FIRST_REPLICA_METRICS the value of the first replica.
MINIMUM_METRICS = ("llmcli_last_token_age_seconds",)
FIRST_REPLICA_METRICS = ("llmcli_model_info",)
MAXIMUM_METRICS = (
    "llamacpp:n_tokens_max",
    # replicas on one machine report the same GPUs
    "llmcli_gpu_busy_ratio",
    "llmcli_gpu_memory_busy_ratio",
    "llmcli_gpu_memory_used_bytes",
    "llmcli_gpu_memory_bytes",
    "llmcli_gpu_power_watts",
    # replicas share the folder of --cache-dir
    "llmcli_disk_cache_bytes",
    "llmcli_disk_cache_max_bytes",
    "llmcli_disk_cache_files",
)
MEAN_METRICS = (
    "llamacpp:prompt_tokens_seconds",
    "llamacpp:predicted_tokens_seconds",
    "llamacpp:n_busy_slots_per_decode",
)
SHARE_METRICS = {"llmcli_kv_cache_usage_perc": ("llmcli_kv_cells_used", "llmcli_kv_cells")}
# Metrics that are also reported for each replica: load and cache.
PER_REPLICA_METRICS = (
    "llmcli_num_requests_running",
    "llmcli_num_requests_waiting",
    "llmcli_kv_cache_usage_perc",
    "llmcli_generation_tokens_total",
    "llmcli_prompt_tokens_total",
    "llmcli_prompt_tokens_cached_total",
)
SUMMED_KV_FIELDS = (
    "cells",
    "used_cells",
    "free_cells",
    "saved_cells",
    "running",
    "waiting",
    "preempted",
    "embedding_bytes",
    "reading_bytes",
    "predicted_bytes",
    "allocated_bytes",
    "compute_bytes",
)


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Return one Prometheus text for all replicas. `texts`: the Prometheus text of each replica by
    its name.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}  # sample name with labels -> value by replica
    for replica, text in texts.items():
        for line in text.splitlines():
            if line.startswith("#"):
                metric = line.split()[2]
                heads.setdefault(metric, [])
                if line not in heads[metric]:
                    heads[metric].append(line)
            elif line:
                sample, value_text = line.rsplit(" ", 1)
                samples.setdefault(sample, {})[replica] = float(value_text)
    sums = {
        sample: _merge_values(sample, list(values.values())) for sample, values in samples.items()
    }
    for share, (used, total) in SHARE_METRICS.items():
        if share in sums and sums.get(total):
            sums[share] = sums[used] / sums[total]
    lines: list[str] = []
    for sample, value in sums.items():
        lines += [*heads.pop(_metric_name(sample, heads), ()), f"{sample} {value:.17g}"]
    for name in PER_REPLICA_METRICS:
        replica_metric = name.replace("llmcli_", "llmcli_replica_", 1)
        lines.append(f"# TYPE {replica_metric} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [
            f'{replica_metric}{{replica="{replica}"}} {value:.17g}'
            for replica, value in samples.get(name, {}).items()
        ]
    return "\n".join(lines) + "\n"


def merge_kv(documents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `/v1/kv` report for all replicas: the sums of the fields, and the report of each
    replica.
    """
    sums = {
        name: sum(report[name] for report in documents.values())
        for name in SUMMED_KV_FIELDS
        if all(isinstance(report.get(name), int) for report in documents.values())
    }
    return {**sums, "replicas": dict(documents)}


def merge_bodies(path: str, bodies: Mapping[str, bytes]) -> bytes:
    """Return the merged response body for one of MERGED_PATHS. `bodies`: the body of each replica
    by its name.
    """
    if path == "/metrics":
        return merge_metrics({name: raw.decode() for name, raw in bodies.items()}).encode()
    return json.dumps(merge_kv({name: json.loads(raw) for name, raw in bodies.items()})).encode()


MERGED_PATHS = ("/metrics", "/v1/kv")


def _merge_values(sample: str, values: list[float]) -> float:
    """Return the value of a sample for all replicas: usually the sum."""
    name = sample.partition("{")[0]
    if name in MINIMUM_METRICS:
        return min(values)
    if name in MAXIMUM_METRICS:
        return max(values)
    if name in MEAN_METRICS:
        return sum(values) / len(values)
    return values[0] if name in FIRST_REPLICA_METRICS else sum(values)


def _metric_name(sample: str, heads: Mapping[str, Any]) -> str:
    """Return the name of the metric that a sample belongs to. A histogram's samples have three
    names: the metric's name with different endings.
    """
    name = sample.partition("{")[0]
    stem = next(
        (
            name.removesuffix(ending)
            for ending in ("_bucket", "_sum", "_count")
            if name.endswith(ending)
        ),
        name,
    )
    return name if name in heads else stem
