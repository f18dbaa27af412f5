"""The memory and the metrics of all models of a server, in one report each."""

import asyncio
import json
import math
import re
import time
from contextlib import aclosing, suppress
from typing import Any

from llmcli.serve.processes.asgi_relay import portable_scope
from llmcli.serve.processes.front import UpstreamLost
from llmcli.serve.processes.models.model_pool import ModelPool, PooledModel

REPORT_SECONDS = 10.0  # time for a process to report
# a sample of Prometheus' text format: its name, its labels if it has any, and its value
SAMPLE_PATTERN = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.ASCII)


def model_fields(model: PooledModel) -> dict[str, Any]:
    """Return the memory and the use of a model as a JSON object."""
    now, memory = time.monotonic(), model.memory
    is_loaded = model.state == "loaded"
    expires = model.expires_at - now
    stays = model.served.is_pinned or math.isinf(expires)
    return {
        "bytes": model.reserved_bytes,
        "planned": {**memory.as_dict(), "needed_bytes": memory.needed_bytes} if memory else None,
        "pinned": model.served.is_pinned,
        "running": model.n_running,
        "waiting": model.n_waiting,
        "draining": model.drains_for or None,
        "idle_ms": round((now - model.last_used) * 1e3)
        if is_loaded and not model.n_running
        else None,
        "expires_ms": None if stays or not is_loaded else round(max(0.0, expires) * 1e3),
        "loads": model.n_loads,
        "crashes": model.n_crashes,
        "load_ms": round(model.load_seconds * 1e3) if model.n_loads else None,
        "error": model.error or None,
        "hint": model.error_hint or None,
    }


def memory_totals(pool: ModelPool) -> dict[str, int]:
    """Return the limit of all models, and what counts for them now."""
    return {"limit_bytes": pool.settings.limit_bytes, "reserved_bytes": pool.reserved_bytes}


async def collect_memory(pool: ModelPool, scope: Any) -> dict[str, Any]:
    """Return the bytes of all models, with the cache report of each loaded one. `scope`: that of the
    request for it.
    """
    bodies = await _ask_loaded(pool, scope)
    models = {}
    for name, model in pool.models.items():
        models[name] = {"state": model.shown_state, **model_fields(model), "cache": None}
        with suppress(ValueError):
            models[name]["cache"] = json.loads(bodies.get(name, b""))
    return {**memory_totals(pool), "models": models}


async def collect_metrics(pool: ModelPool, scope: Any) -> str:
    """Return one Prometheus text for all models: the samples of each loaded one with the label
    `model`, and the pool's own.
    """
    bodies = await _ask_loaded(pool, scope)
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, raw in bodies.items():
        metric = ""
        for line in raw.decode("utf-8", "replace").splitlines():
            if line.startswith("#"):
                metric = line.split()[2]
                heads.setdefault(metric, [])
                if line not in heads[metric]:
                    heads[metric].append(line)
            elif match := SAMPLE_PATTERN.fullmatch(line):
                labels = f'model="{_escape(name)}"' + (f",{match[2]}" if match[2] else "")
                samples.setdefault(metric, []).append(f"{match[1]}{{{labels}}} {match[3]}")
    lines = _pool_metrics(pool)
    for metric, metric_samples in samples.items():
        lines += [*heads.get(metric, ()), *metric_samples]
    return "\n".join(lines) + "\n"


def _pool_metrics(pool: ModelPool) -> list[str]:
    """Return the metrics of the pool in Prometheus' text format."""
    lines = [
        "# HELP llmcli_models_memory_limit_bytes The most bytes of all models together.",
        "# TYPE llmcli_models_memory_limit_bytes gauge",
        f"llmcli_models_memory_limit_bytes {pool.settings.limit_bytes}",
    ]
    columns = (
        ("llmcli_model_loaded", "gauge", "1 while the model is loaded", "is_loaded"),
        ("llmcli_model_bytes", "gauge", "Bytes that count for the model now", "bytes"),
        ("llmcli_model_requests_running", "gauge", "Requests of its process", "running"),
        ("llmcli_model_requests_waiting", "gauge", "Requests that wait for it", "waiting"),
        ("llmcli_model_loads_total", "counter", "How often it was loaded", "loads"),
        ("llmcli_model_crashes_total", "counter", "How often its process was lost", "crashes"),
    )
    fields = {
        name: {**model_fields(model), "is_loaded": int(model.state == "loaded")}
        for name, model in pool.models.items()
    }
    for metric, kind, text, key in columns:
        lines += [f"# HELP {metric} {text}.", f"# TYPE {metric} {kind}"]
        lines += [
            f'{metric}{{model="{_escape(name)}"}} {values[key]}' for name, values in fields.items()
        ]
    return lines


async def _ask_loaded(pool: ModelPool, scope: Any) -> dict[str, bytes]:
    """Return the body of the answer of each loaded model to a request without a body. A model that
    does not answer with status 200 is left out.
    """
    loaded = [model for model in pool.models.values() if model.state == "loaded"]
    bodies = await asyncio.gather(*(_ask(model, portable_scope(scope)) for model in loaded))
    return {
        model.name: body for model, body in zip(loaded, bodies, strict=True) if body is not None
    }


async def _ask(model: PooledModel, scope: dict[str, Any]) -> bytes | None:
    """Return the body of a loaded model's answer; None if it has none."""
    assert model.process is not None
    body, status = bytearray(), 0
    try:
        async with (
            asyncio.timeout(REPORT_SECONDS),
            aclosing(model.process.ask(scope, b"", b"")) as messages,
        ):
            async for message in messages:
                status = message.get("status", status)
                body += message.get("body", b"")
    except (TimeoutError, UpstreamLost):
        return None
    return bytes(body) if status == 200 else None


def _escape(name: str) -> str:
    """Return a name as it is written in a label."""
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
