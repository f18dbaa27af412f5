"""The metrics of several replicas in one text: values are summed where this makes sense, and
nothing is counted twice.
"""

import json

from llmcli.serve.engine_thread.metrics import LiveGauges, ServerMetrics
from llmcli.serve.processes.merged_metrics import merge_bodies, merge_kv, merge_metrics
from tests.fixtures.fakes import fake_runner
from tests.serve.http.routes.test_metrics import LINE


def replica_text(tokens: int, cells: int) -> str:
    """Return the Prometheus text of one replica."""
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
    assert len(set(lines)) == len(lines)  # HELP and TYPE lines are not repeated
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs)
    return {name: float(value) for name, value in pairs}


def test_counters_gauges_and_buckets_are_summed_but_not_ratios() -> None:
    first, second = replica_text(3, 128), replica_text(4, 0)
    found, single = values(merge_metrics({"a": first, "b": second})), values(first)
    assert found["llmcli_embedding_tokens_total"] == 7
    assert found["llmcli_kv_cells"] == 1024 and found["process_resident_memory_bytes"] == 2000
    assert found["llmcli_kv_cache_usage_perc"] == 128 / 1024
    assert found['llmcli_model_info{model="tiny"}'] == 1
    assert found["llmcli_last_token_age_seconds"] == min(
        single["llmcli_last_token_age_seconds"], values(second)["llmcli_last_token_age_seconds"]
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


def test_cache_reports_are_summed_and_listed() -> None:
    first, second = (
        {"cells": 5, "running": 1, "type_k": "f16", "compute_bytes": None},
        {"cells": 6, "running": 0},
    )
    found = merge_kv({"a": first, "b": second})
    assert found == {"cells": 11, "running": 1, "replicas": {"a": first, "b": second}}
    assert json.loads(merge_bodies("/v1/kv", {"a": b'{"cells": 1}'})) == {
        "cells": 1,
        "replicas": {"a": {"cells": 1}},
    }
