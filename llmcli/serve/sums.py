"""What several models tell of themselves, as one: sums under the names that one has, and what each
has beside them.

A sample of one replica stands under `llmcli_replica_…{replica="…"}`, and not under the sum's own
name, so that whoever adds up a name's samples counts nothing twice.
"""

import json
from collections.abc import Mapping
from typing import Any

# Not sums: which replica's value holds.
SMALLEST = ("llmcli_last_token_age_seconds",)
FIRST = ("llmcli_model_info",)
SHARES = {"llmcli_kv_cache_usage_perc": ("llmcli_kv_cells_used", "llmcli_kv_cells")}
# Told of each replica, too: who has work, and how full it is.
EACH = (
    "llmcli_num_requests_running",
    "llmcli_num_requests_waiting",
    "llmcli_kv_cache_usage_perc",
    "llmcli_generation_tokens_total",
    "llmcli_prompt_tokens_total",
    "llmcli_prompt_tokens_cached_total",
)
ADDED = (
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


def metrics(texts: Mapping[str, str]) -> str:
    """Prometheus' text of all, from each replica's by its name."""
    heads: dict[str, list[str]] = {}
    found: dict[str, dict[str, float]] = {}  # a sample's name with its labels -> by replica
    for replica, text in texts.items():
        for line in text.splitlines():
            if line.startswith("#"):
                kind = line.split()[2]
                heads.setdefault(kind, [])
                if line not in heads[kind]:
                    heads[kind].append(line)
            elif line:
                sample, told = line.rsplit(" ", 1)
                found.setdefault(sample, {})[replica] = float(told)
    sums = {sample: _together(sample, list(values.values())) for sample, values in found.items()}
    for share, (used, all_of) in SHARES.items():
        if share in sums and sums.get(all_of):
            sums[share] = sums[used] / sums[all_of]
    lines: list[str] = []
    for sample, value in sums.items():
        lines += [*heads.pop(_metric(sample, heads), ()), f"{sample} {value:.17g}"]
    for name in EACH:
        each = name.replace("llmcli_", "llmcli_replica_", 1)
        lines.append(f"# TYPE {each} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [
            f'{each}{{replica="{replica}"}} {value:.17g}'
            for replica, value in found.get(name, {}).items()
        ]
    return "\n".join(lines) + "\n"


def kv(documents: Mapping[str, Any]) -> dict[str, Any]:
    """`/v1/kv` of all: what adds up, and each replica's own report."""
    added = {
        name: sum(one[name] for one in documents.values())
        for name in ADDED
        if all(isinstance(one.get(name), int) for one in documents.values())
    }
    return {**added, "replicas": dict(documents)}


def together(path: str, bodies: Mapping[str, bytes]) -> bytes:
    """The body of a path of SUMMED, from each replica's."""
    if path == "/metrics":
        return metrics({name: raw.decode() for name, raw in bodies.items()}).encode()
    return json.dumps(kv({name: json.loads(raw) for name, raw in bodies.items()})).encode()


SUMMED = ("/metrics", "/v1/kv")


def _together(sample: str, values: list[float]) -> float:
    name = sample.partition("{")[0]
    return min(values) if name in SMALLEST else values[0] if name in FIRST else sum(values)


def _metric(sample: str, heads: Mapping[str, Any]) -> str:
    """The metric that a sample belongs to: a histogram's are three names."""
    name = sample.partition("{")[0]
    bare = next(
        (name.removesuffix(end) for end in ("_bucket", "_sum", "_count") if name.endswith(end)),
        name,
    )
    return name if name in heads else bare
