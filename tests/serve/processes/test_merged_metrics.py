"""Metrics of several replicas in one text: sums where they make sense, nothing counted twice."""

import json

from llmcli.serve.engine_thread.metrics import LiveGauges, ServerMetrics
from llmcli.serve.processes.merged_metrics import merge_bodies, merge_kv, merge_metrics
from tests.fixtures.fakes import fake_runner
from tests.serve.http.routes.test_metrics import LINE


def told(tokens: int, cells: int) -> str:
    """A replica's own text."""
    runner = fake_runner(b"x", n_ctx=512, n_seq_max=2)
    meter = ServerMetrics()
    meter.record_embedding(tokens)
    if tokens:
        meter.record_token()
    text = meter.render("tiny", LiveGauges(runner.engine.stats, runner.kv_report(), 0, 1000))
    return text.replace("llmcli_kv_cells_used 0", f"llmcli_kv_cells_used {cells}").replace(
        "llmcli_kv_cache_usage_perc 0", f"llmcli_kv_cache_usage_perc {cells / 512}"
    )


def values(text: str) -> dict[str, float]:
    lines = text.splitlines()
    assert [line for line in lines if not LINE.match(line)] == []
    assert len(set(lines)) == len(lines)  # a head stands once
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs)
    return {name: float(value) for name, value in pairs}


def test_counters_gauges_and_buckets_are_summed_and_shares_are_not() -> None:
    one, other = told(3, 128), told(4, 0)
    found, single = values(merge_metrics({"a": one, "b": other})), values(one)
    assert found["llmcli_embedding_tokens_total"] == 7
    assert found["llmcli_kv_cells"] == 1024 and found["process_resident_memory_bytes"] == 2000
    assert found["llmcli_kv_cache_usage_perc"] == 128 / 1024
    assert found['llmcli_model_info{model="tiny"}'] == 1
    assert found["llmcli_last_token_age_seconds"] == min(
        single["llmcli_last_token_age_seconds"], values(other)["llmcli_last_token_age_seconds"]
    )
    assert found['llmcli_replica_kv_cache_usage_perc{replica="a"}'] == 0.25
    assert found['llmcli_replica_kv_cache_usage_perc{replica="b"}'] == 0
    assert set(single) <= set(found)
    buckets = [
        name for name in found if name.startswith("llmcli_time_to_first_token_seconds_bucket")
    ]
    assert buckets == [
        name for name in single if name.startswith("llmcli_time_to_first_token_seconds_bucket")
    ]


def test_reports_of_caches_are_summed_beside_each() -> None:
    one, other = (
        {"cells": 5, "running": 1, "type_k": "f16", "compute_bytes": None},
        {"cells": 6, "running": 0},
    )
    found = merge_kv({"a": one, "b": other})
    assert found == {"cells": 11, "running": 1, "replicas": {"a": one, "b": other}}
    assert json.loads(merge_bodies("/v1/kv", {"a": b'{"cells": 1}'})) == {
        "cells": 1,
        "replicas": {"a": {"cells": 1}},
    }
