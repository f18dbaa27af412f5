"""Sends requests to all loaded models, and merges their reports on memory and metrics into one
each.
"""

import asyncio
import json
import math
import re
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.serve.processes.asgi_relay import portable_scope
from llmcli.serve.processes.front import UpstreamLost
from llmcli.serve.processes.models.admitted_process import AdmittedProcess
from llmcli.serve.processes.models.model_pool import ModelPool
from llmcli.serve.processes.models.pooled_model import PooledModel

REPORT_SECONDS = 10.0  # time for a process to report
# a sample of Prometheus' text format: its name, its labels if it has any, and its value
SAMPLE_PATTERN = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.ASCII)


# The fields of a model in /v1/models of a server of several, for the docs.
MODEL_FIELDS = {
    "aliases": "further names for requests",
    "state": "here, absent, queued, loading, loaded, unloading or failed",
    "status": "llama-server's name of the state (unloaded, loading, loaded), and whether it failed",
    "pid": "the id of its process, if it is loaded",
    "bytes": "bytes of the host that count for its process now",
    "device_bytes": "bytes of each GPU that count for its process now",
    "planned": "bytes that it takes by purpose, once it was planned",
    "pinned": "whether it stays loaded",
    "running": "requests that its process answers",
    "waiting": "requests that wait for it",
    "draining": "why it gets no further requests, or null",
    "idle_ms": "milliseconds since its last request, if it is loaded and idle",
    "expires_ms": "milliseconds until it is unloaded if it stays idle, or null",
    "loads": "how often it was loaded",
    "crashes": "how often its process was lost",
    "load_ms": "milliseconds of its last load",
    "error": "why it failed, or null",
    "hint": "what helps, or null",
}


def model_fields(model: PooledModel) -> dict[str, Any]:
    """Return the memory and the use of a model as a JSON object."""
    now, memory = time.monotonic(), model.memory
    is_loaded = model.state == "loaded"
    expires = model.expires_at - now
    stays = model.served.is_pinned or math.isinf(expires)
    return {
        "pid": model.process.pid if is_loaded and model.process else None,
        "bytes": model.reserved_bytes,
        "device_bytes": model.device_bytes,
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


def memory_totals(pool: ModelPool) -> dict[str, Any]:
    """Return the limit of all models on the host, and what counts for them now. `devices`: the same
    of each GPU.
    """
    totals = {
        device: {"limit_bytes": limit, "reserved_bytes": pool.state.reserved_bytes(device)}
        for device, limit in pool.state.limits.items()
    }
    return {**totals.pop(HOST_DEVICE), "devices": totals}


async def collect_memory(pool: ModelPool, scope: Any) -> dict[str, Any]:
    """Return the bytes of all models, with the cache report of each loaded one. `scope`: that of
    the request for it.
    """
    bodies = await _ask_reports(pool, scope)
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
    bodies = await _ask_reports(pool, scope)
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
    on_gpus = [
        f'llmcli_model_device_bytes{{model="{_escape(name)}",device="{_escape(device)}"}} {nbytes}'
        for name, values in fields.items()
        for device, nbytes in values["device_bytes"].items()
    ]
    if on_gpus:
        lines.append(
            "# HELP llmcli_model_device_bytes Bytes that count for the model on a GPU now."
        )
        lines += ["# TYPE llmcli_model_device_bytes gauge", *on_gpus]
    return lines


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The answer of a model to a request of the server."""

    status: int
    body: bytes


async def find_answer(pool: ModelPool, scope: Any, body: bytes) -> ModelAnswer | None:
    """Send a request to all loaded models, and return the first answer that is not 404; None if
    there is none. It does not wait for the others, of which one may be busy.
    """
    tasks = [
        asyncio.ensure_future(_ask(process, portable_scope(scope), body))
        for process in _loaded_processes(pool).values()
    ]
    try:
        for done in asyncio.as_completed(tasks):
            answer = await done
            if answer is not None and answer.status != HTTPStatus.NOT_FOUND:
                return answer
    finally:
        for task in tasks:
            task.cancel()
    return None


def _loaded_processes(pool: ModelPool) -> dict[str, AdmittedProcess]:
    """Return the processes of the loaded models by name."""
    return {
        model.name: model.process
        for model in pool.models.values()
        if model.state == "loaded" and model.process is not None
    }


async def ask_loaded(pool: ModelPool, scope: Any, body: bytes = b"") -> dict[str, ModelAnswer]:
    """Send a request to all loaded models, and return the answer of each by its name. A model that
    is lost or does not answer in time is left out.
    """
    processes = _loaded_processes(pool)
    answers = await asyncio.gather(
        *(_ask(process, portable_scope(scope), body) for process in processes.values())
    )
    return {
        name: answer for name, answer in zip(processes, answers, strict=True) if answer is not None
    }


async def _ask_reports(pool: ModelPool, scope: Any) -> dict[str, bytes]:
    """Return the report of each loaded model that has one. `scope`: that of the request for it."""
    answers = await ask_loaded(pool, scope)
    return {name: answer.body for name, answer in answers.items() if answer.status == HTTPStatus.OK}


async def _ask(process: AdmittedProcess, scope: dict[str, Any], body: bytes) -> ModelAnswer | None:
    """Return the answer of a process; None if it has none."""
    raw, status = bytearray(), 0
    try:
        async with (
            asyncio.timeout(REPORT_SECONDS),
            aclosing(process.ask(scope, body, b"")) as messages,
        ):
            async for message in messages:
                status = message.get("status", status)
                raw += message.get("body", b"")
    except (TimeoutError, UpstreamLost):
        return None
    return ModelAnswer(status, bytes(raw)) if status else None


def _escape(name: str) -> str:
    """Return a name as it is written in a label."""
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
