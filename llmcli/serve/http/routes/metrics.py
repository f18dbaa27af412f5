"""`/metrics`: the server's counters as Prometheus' text."""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.hardware.host import resident_memory
from llmcli.runtime.runner import Runner
from llmcli.serve.engine_thread.metrics import CONTENT_TYPE, Standing
from llmcli.serve.http.service import Route, Service


async def metrics(service: Service, request: Request) -> Response:
    """Respond with the metrics, read from the engine between two steps."""
    bridge = service.bridge
    gauges = await bridge.call(lambda: _read_gauges(bridge.runner))
    return Response(bridge.meter.text(service.settings.name, gauges), media_type=CONTENT_TYPE)


def _read_gauges(runner: Runner) -> Standing:
    ledger = runner.engine.ledger
    saved = sum(map(len, ledger.tokens)) - ledger.used
    return Standing(runner.engine.load, runner.kv_report(), saved, resident_memory())


ROUTES = (Route("/metrics", metrics),)
