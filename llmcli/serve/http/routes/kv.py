"""`/v1/kv`: the state of the KV cache: bytes, cells, sequences and their common prefixes, and why
prompts were not found in it. The response contains no text of requests, except the two tokens with
which a prompt of the same client leaves an earlier one.
"""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.runtime.kv_cache.usage import PrefixNode, measure_cache_usage
from llmcli.runtime.runner import Runner
from llmcli.serve.http.api_keys import connected_client
from llmcli.serve.http.exchange import json_response
from llmcli.serve.http.service import Route, Service


async def show_cache(service: Service, request: Request) -> Response:
    """Respond with a report on the cache, made between two steps of the engine. With `?check=true`,
    the engine's ledger of cells is first compared with llama.cpp's state; a difference is a bug
    and ends the engine.
    """
    bridge, check = service.bridge, request.query_params.get("check") == "true"
    if check:
        await bridge.run_on_engine_thread(bridge.runner.engine.check, is_vital=True)
    report = await bridge.run_on_engine_thread(lambda: build_cache_report(bridge.runner))
    client = connected_client(request, service.settings.keys)
    is_private = not bridge.runner.engine.schedule.share_prefixes
    losses = await bridge.losses.documents(client, is_private)
    return json_response({**report, "losses": losses, "checked": check})


def build_cache_report(runner: Runner) -> dict[str, Any]:
    """Return the report on the cache as a JSON object. Runs on the engine's thread."""
    engine = runner.engine
    load, usage, scheduler = engine.stats, measure_cache_usage(engine.ledger), engine.scheduler
    return {
        **asdict(runner.kv_report()),
        "embedding_bytes": runner.embedding_bytes,
        "reading_bytes": runner.prefill_bytes,
        "saved_cells": sum(map(len, engine.ledger.tokens)) - engine.ledger.used_cells,
        "outside": {
            "swapped_bytes": scheduler.swap.nbytes,
            "finished_bytes": scheduler.idle_offload.nbytes,
            "checkpoint_bytes": engine.ledger.checkpoints.nbytes,
            "most_bytes": scheduler.offload_store.max_bytes,
        },
        "disk": asdict(scheduler.disk_cache.usage) if scheduler.disk_cache else None,
        "running": load.n_running,
        "waiting": load.n_waiting,
        "preempted": load.n_preempted,
        "sequences": [
            {
                "slot": sequence.slot,
                "state": "running" if sequence.is_running else "cached",
                "tokens": sequence.tokens,
                "own_cells": sequence.exclusive_cells,
                "shared_cells": sequence.shared_cells,
                "checkpoints": list(sequence.checkpoints),
            }
            for sequence in usage.sequences
        ],
        "prefixes": [_prefix_document(node) for node in usage.prefixes],
    }


def _prefix_document(node: PrefixNode) -> dict[str, Any]:
    """Return a prefix and its continuations as JSON objects, without texts."""
    return {
        "tokens": node.tokens,
        "slots": sorted(node.slots),
        "children": [_prefix_document(child) for child in node.children],
    }


ROUTES = (Route("/v1/kv", show_cache),)
