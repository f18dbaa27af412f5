"""`/v1/kv`: the cache as it stands: bytes, cells, who holds them, and which texts begin alike. No
text is told.
"""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.runtime.census import Node, census
from llmcli.runtime.runner import Runner
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.stream import json_response


async def kv(service: Service, request: Request) -> Response:
    """The report, taken between two steps; `?check=true` compares the books with llama.cpp's own
    first.
    """
    runner, check = service.bridge.runner, request.query_params.get("check") == "true"
    return json_response(await service.bridge.call(lambda: report(runner, check)))


def report(runner: Runner, check: bool = False) -> dict[str, Any]:
    """On the engine's thread. A difference that `check` finds is a bug and crashes."""
    engine = runner.engine
    if check:
        engine.check()
    load, count, scheduler = engine.load, census(engine.ledger), engine.scheduler
    return {
        **asdict(runner.kv_report()),
        "embedding_bytes": runner.embedding_bytes,
        "reading_bytes": runner.reading_bytes,
        "saved_cells": sum(map(len, engine.ledger.tokens)) - engine.ledger.used,
        "outside": {
            "swapped_bytes": scheduler.swap.nbytes,
            "finished_bytes": scheduler.parking.nbytes,
            "most_bytes": 2 * engine.schedule.swap_bytes,
        },
        "running": load.running,
        "waiting": load.waiting,
        "preempted": load.preempted,
        "sequences": [
            {
                "slot": one.slot,
                "state": "running" if one.running else "cached",
                "tokens": one.tokens,
                "own_cells": one.own,
                "shared_cells": one.shared,
            }
            for one in count.held
        ],
        "prefixes": [_told(node) for node in count.prefixes],
        "checked": check,
    }


def _told(node: Node) -> dict[str, Any]:
    return {
        "tokens": node.tokens,
        "slots": sorted(node.slots),
        "children": [_told(one) for one in node.children],
    }


ROUTES = (Route("/v1/kv", kv),)
