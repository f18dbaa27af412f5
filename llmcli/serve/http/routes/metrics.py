"""`/metrics`: the metrics of the server as Prometheus text."""

import asyncio
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from llmcli.hardware.gpu_usage import read_gpus
from llmcli.hardware.host import resident_memory
from llmcli.runtime.runner import Runner
from llmcli.serve.engine_thread.metrics import CONTENT_TYPE, LiveGauges
from llmcli.serve.http.service import Route, Service


async def show_metrics(service: Service, request: Request) -> Response:
    """Respond with the metrics. The values of the engine are read between two steps."""
    bridge = service.bridge
    gauges = await bridge.run_on_engine_thread(lambda: _read_gauges(bridge.runner))
    gauges = replace(gauges, gpus=await asyncio.to_thread(read_gpus))
    text = bridge.metrics.render(service.settings.model_name, gauges)
    response = Response(text, media_type=CONTENT_TYPE)
    # In llama-server's capitals, which Starlette's `headers` would lose: some of its clients look
    # for exactly this name.
    started_at = str(service.settings.created).encode()
    response.raw_headers.append((b"Process-Start-Time-Unix", started_at))
    return response


def _read_gauges(runner: Runner) -> LiveGauges:
    ledger = runner.engine.ledger
    saved = sum(map(len, ledger.tokens)) - ledger.used_cells
    disk_cache = runner.engine.scheduler.disk_cache
    return LiveGauges(
        runner.engine.stats,
        runner.kv_report(),
        saved,
        resident_memory(),
        disk=disk_cache.usage if disk_cache else None,
    )


ROUTES = (Route("/metrics", show_metrics),)
