"""/metrics, /health and /v1/kv."""

import re
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest

from llmcli.planning.prediction.cache_layout import checkpoint_bytes
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.draft_settings import NO_DRAFTING
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.kv_cache import offload_store
from llmcli.serve.http.routes.kv import build_cache_report
from quant.model_file.read_header import read_header
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.fakes import fake_runner
from tests.fixtures.server import Served, serving
from tests.fixtures.small_runner import open_small
from tests.quant import tiny_gguf

# Prometheus' text format, version 0.0.4: a line is a comment, or a name, labels and a number.
LINE = re.compile(
    r'^(?:# (?:HELP|TYPE) \S+ .*|[a-zA-Z_:][\w:]*(?:\{\w+="(?:[^"\\\n]|\\.)*"(?:,\w+="[^"]*")*\})? \S+)$'
)


def metrics(served: Served) -> dict[str, float]:
    answer = httpx.get(f"{served.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text.endswith("\n")
    lines = answer.text.splitlines()
    assert [line for line in lines if not LINE.match(line)] == []
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    typed = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    for name in found:  # each sample belongs to a metric with a TYPE line
        sample = name.split("{")[0]
        assert sample in typed or typed[re.sub("_(bucket|sum|count)$", "", sample)] == "histogram"
    return {name: float(value) for name, value in found.items()}


def test_answers_and_tokens_are_counted(serve: Callable[..., Served]) -> None:
    served = serve(b"hello world")
    before = metrics(served)
    assert before["llmcli_num_requests_running"] == before["llmcli_generation_tokens_total"] == 0
    assert before["llmcli_kv_cells"] == 512
    assert "llmcli_last_token_age_seconds" not in before
    with client(served) as api:
        api.chat.completions.create(model="tiny", messages=HELLO)
        api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    after = metrics(served)
    assert after['llmcli_request_success_total{finished_reason="stop"}'] == 1
    assert after['llmcli_request_success_total{finished_reason="length"}'] == 1
    tokens = len(b"hello world") + 2
    assert after["llmcli_generation_tokens_total"] == tokens
    assert after["llmcli_prompt_tokens_cached_total"] > 0
    prompt = after["llmcli_request_prompt_tokens_sum"]
    assert (
        after["llmcli_prompt_tokens_total"] + after["llmcli_prompt_tokens_cached_total"] == prompt
    )
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("e2e_request_latency_seconds", 2),
        ("request_prompt_tokens", 2),
        ("request_queue_time_seconds", 2),
        ("inter_token_latency_seconds", tokens - 2),
        ("request_time_per_output_token_seconds", 2),
    ):
        assert (
            after[f"llmcli_{name}_count"] == after[f'llmcli_{name}_bucket{{le="+Inf"}}'] == count
        ), name
        buckets = [value for key, value in after.items() if key.startswith(f"llmcli_{name}_bucket")]
        assert buckets == sorted(buckets)
    waited, first = (
        after[f"llmcli_{name}_seconds_sum"]
        for name in ("request_queue_time", "time_to_first_token")
    )
    assert 0 < waited < first
    assert after["llmcli_last_token_age_seconds"] >= 0
    assert 0 < after["llmcli_kv_cells_used"] <= 512
    assert after['llmcli_model_info{model="tiny"}'] == 1


def test_a_model_name_is_escaped_in_its_label(serve: Callable[..., Served]) -> None:
    assert metrics(serve(names=('a"b\\c\nd',)))['llmcli_model_info{model="a\\"b\\\\c\\nd"}'] == 1


def test_a_disconnect_is_counted(serve: Callable[..., Served]) -> None:
    served = serve(b"x" * 400)
    with httpx.stream(
        "POST", f"{served.v1}/chat/completions", json={"messages": HELLO, "stream": True}
    ) as answer:
        next(answer.iter_bytes())
    for _ in range(1000):  # each request runs on the engine's thread between two steps
        found = metrics(served)
        ended = sum(
            value
            for name, value in found.items()
            if name.startswith("llmcli_request_success_total")
        )
        if found["llmcli_requests_cancelled_total"] + ended:
            break
    assert found["llmcli_requests_cancelled_total"] + ended == 1
    assert found["llmcli_num_requests_running"] == 0


def test_health_shows_the_last_token_and_stopping(serve: Callable[..., Served]) -> None:
    served = serve(keys=("secret-key-1",))
    assert httpx.get(f"{served.url}/health").json() == {
        "status": "ok",
        "open": 0,
        "last_token_age_ms": None,
    }
    with client(served, api_key="secret-key-1") as api:
        api.chat.completions.create(model="tiny", messages=HELLO)
    assert httpx.get(f"{served.url}/health").json()["last_token_age_ms"] >= 0
    assert httpx.get(f"{served.url}/metrics").status_code == 401
    served.bridge.stop()
    answer = httpx.get(f"{served.v1}/health")
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "unavailable_error"


def test_the_cache_report_counts_cells_and_prefixes(serve: Callable[..., Served]) -> None:
    served = serve(b"hi")
    with client(served) as api:
        api.chat.completions.create(model="tiny", messages=HELLO)
        api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Another"}])
    found = httpx.get(f"{served.v1}/kv?check=true").json()
    outside = found["outside"]
    assert (
        0
        <= outside["swapped_bytes"] + outside["finished_bytes"]
        <= outside["most_bytes"]
        <= 512 << 20
    )
    assert found["checked"] and found["cells"] == 512
    assert sum(sequence["own_cells"] for sequence in found["sequences"]) == found["used_cells"] > 0
    assert {sequence["state"] for sequence in found["sequences"]} == {"cached"}
    shared = 1 + len("<user>")  # BOS and the common beginning of both prompts
    assert found["prefixes"][0]["tokens"] == shared and len(found["prefixes"][0]["children"]) == 2
    assert found["running"] == found["waiting"] == 0
    assert "Another" not in str(found)


def test_the_checkpoints_of_a_recurrent_model_are_reported(tmp_path: Path) -> None:
    model = tiny_gguf.mamba(tmp_path / "mamba.gguf")
    size = checkpoint_bytes(read_header(model), ContextOptions(512))
    prompt = {"model": "tiny", "prompt": list(range(3, 100)), "max_tokens": 4}
    with open_small(model, NO_DRAFTING) as runner, serving(runner, parallel=1) as served:
        assert httpx.post(f"{served.v1}/completions", json=prompt).status_code == 200
        found = httpx.get(f"{served.v1}/kv?check=true").json()
    (sequence,) = (each for each in found["sequences"] if each["tokens"])
    lengths = sequence["checkpoints"]
    assert lengths and lengths == sorted(set(lengths)) and lengths[-1] <= sequence["tokens"]
    assert found["outside"]["checkpoint_bytes"] == len(lengths) * size
    assert found["outside"]["most_bytes"] >= found["outside"]["checkpoint_bytes"]


def test_the_cache_report_has_the_present_budget_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_store, "MEASURE_SECONDS", 0)
    runner = fake_runner()
    runner.engine.schedule = Schedule(host_bytes=1 << 20, measure_host_bytes=lambda held: 1000)
    assert build_cache_report(runner)["outside"]["most_bytes"] == 1 << 20
    runner.engine.scheduler.offload_store.has_room(0)
    assert build_cache_report(runner)["outside"]["most_bytes"] == 1000


@pytest.mark.parametrize("path", ["metrics", "v1/kv", "health"])
def test_reports_refuse_post(serve: Callable[..., Served], path: str) -> None:
    assert httpx.post(f"{serve().url}/{path}").status_code == 405


def test_metrics_have_the_names_of_llama_server_too(tiny: Served) -> None:
    """As its own tests check them: the counts agree with the timings of the answers."""
    text = "a very new beginning of a story about a dog. " * 3
    before = llama_server_metrics(tiny)
    timings = [
        httpx.post(
            f"{tiny.url}/completion", json={"prompt": text, "n_predict": 4, "ignore_eos": True}
        ).json()["timings"]
        for _ in range(2)
    ]
    after = llama_server_metrics(tiny)

    def added(name: str) -> float:
        return after[name] - before[name]

    assert added("prompt_tokens_total") == sum(item["prompt_n"] for item in timings)
    assert added("prompt_tokens_cached_total") == sum(item["cache_n"] for item in timings) > 0
    assert added("tokens_predicted_total") == 8
    assert added("n_decode_total") >= 8
    assert after["n_tokens_max"] >= timings[0]["prompt_n"] + timings[0]["cache_n"] + 4
    assert after["requests_processing"] == after["requests_deferred"] == 0
    assert after["n_busy_slots_per_decode"] >= 1
    assert after["prompt_tokens_seconds"] > 0 and after["predicted_tokens_seconds"] > 0
    httpx.post(f"{tiny.v1}/embeddings", json={"input": "hello"})
    embedded = llama_server_metrics(tiny)
    assert embedded["prompt_tokens_total"] > after["prompt_tokens_total"]
    assert embedded["n_decode_total"] > after["n_decode_total"]
    started_at = b"Process-Start-Time-Unix", str(tiny.settings.created).encode()
    assert started_at in httpx.get(f"{tiny.url}/metrics").headers.raw


def llama_server_metrics(served: Served) -> dict[str, float]:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    pairs = [line.split(" ", 1) for line in lines if line.startswith("llamacpp:")]
    return {name.removeprefix("llamacpp:"): float(value) for name, value in pairs}
