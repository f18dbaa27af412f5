"""The work of `bench load`: connect to the servers, apply the loads and save the results. The
options are defined in llmcli/commands/bench/load.py, the tables in reports/load.py next to it.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from llmcli.bench.history import history
from llmcli.bench.load import ab_comparison, max_load, output, session
from llmcli.bench.load.ab_comparison import ServerComparison
from llmcli.bench.load.client import LoadTarget
from llmcli.bench.load.local_server import open_local_server
from llmcli.bench.load.max_load import MaxLoadResult, MaxLoadSettings
from llmcli.bench.load.metrics import LoadMetrics, compute_metrics
from llmcli.bench.load.request import LoadRequest
from llmcli.bench.load.result import LoadResult
from llmcli.bench.load.session import ServerSession
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.http_client.api_address import parse_base_url
from llmcli.types import ProgressBar
from llmcli.ui import UI
from llmcli.units import format_current_time


def run_load(request: LoadRequest, config: Config, ui: UI) -> LoadResult:
    """Run the measurements of a request, and save the results to the history. Raises UserError."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_open_server(name, request, config, ui)) for name in request.servers
        ]
        if request.prompts.is_generated and not request.prompts.shared:
            ui.note(
                "prompts are distinct: a prefix cache can reuse only the chat template "
                "(--shared makes prompts share more)"
            )
        result = asyncio.run(_measure(servers, request, ui))
    if request.keep_history:
        _save_results(result, config, ui)
    return result


async def _measure(servers: Sequence[LoadTarget], request: LoadRequest, ui: UI) -> LoadResult:
    began, rules = format_current_time(), request.search_rules
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                session.open_session(server, request.prompts.source(request.seed))
            )
            for server in servers
        ]
        environments = tuple(
            _environment(server_session, request, began) for server_session in sessions
        )
        if rules:
            return LoadResult(
                environments,
                max_loads=tuple(await _search_max_loads(sessions[0], rules, request, ui)),
            )
        if len(sessions) > 1:
            return LoadResult(
                environments,
                comparisons=tuple(await _compare_servers((sessions[0], sessions[1]), request, ui)),
            )
        return LoadResult(environments, tuple(await _measure_loads(sessions[0], request, ui)))


async def _measure_loads(
    server_session: ServerSession, request: LoadRequest, ui: UI
) -> list[LoadMetrics]:
    loads, length = request.levels.loads, request.length
    metrics, n_runs = [], length.repetitions or 1
    total = length.total_requests(len(loads), n_runs)
    with ui.bar(f"load {server_session.model}", total, "requests") as bar:
        for load_index, load in enumerate(loads):
            bar.describe(f"load {server_session.model}: {load.name}")
            runs = [
                await server_session.run_load(
                    load,
                    length.load_length,
                    1 + load_index * n_runs + run_index,
                    tick=_advance_by_one(bar),
                )
                for run_index in range(n_runs)
            ]
            metrics.append(compute_metrics(runs, request.search.limits))
    return metrics


async def _compare_servers(
    sessions: tuple[ServerSession, ServerSession], request: LoadRequest, ui: UI
) -> list[ServerComparison]:
    loads, length = request.levels.loads, request.length
    turns = length.repetitions or ab_comparison.DEFAULT_TURNS
    with ui.bar("compare", 2 * turns * len(loads), "tests") as bar:
        return [
            await ab_comparison.compare_servers(
                sessions,
                load,
                length.load_length,
                turns,
                request.search.limits,
                1 + load_index * turns,
                _advance_by_one(bar),
            )
            for load_index, load in enumerate(loads)
        ]


async def _search_max_loads(
    server_session: ServerSession, rules: MaxLoadSettings, request: LoadRequest, ui: UI
) -> list[MaxLoadResult]:
    results: list[MaxLoadResult] = []
    with ui.bar(f"search {server_session.model}", None, "tests") as bar:

        def tick(name: str) -> None:
            bar.describe(f"search {server_session.model}: {name}")
            bar.advance(1)

        for kind in request.search.kinds:
            # The server reaches about the same request rate at its largest concurrency.
            best_metrics = results[0].best_metrics if results else None
            first = best_metrics.request_rate if best_metrics else None
            results.append(
                await max_load.find_max_load(
                    server_session, kind, rules, first, 1 + 1000 * len(results), tick
                )
            )
    return results


@contextmanager
def _open_server(name: str, request: LoadRequest, config: Config, ui: UI) -> Iterator[LoadTarget]:
    """Yield the server at a URL. For a model, start a server, yield it, and stop it after the
    block. Raises UserError.
    """
    target = request.target
    extra = {
        "temperature": 0,
        **({"ignore_eos": True} if request.prompts.is_generated else {}),
        **target.extra_fields,
    }
    server = LoadTarget(
        "",
        target.model,
        target.read_key(),
        target.endpoint == "chat",
        extra,
        target.cacert,
        target.insecure,
        target.timeout,
    )
    if "://" in name:
        server = replace(server, base_url=parse_base_url(name))
        if config.offline and not server.is_local:
            raise UserError(f"{name} is not this machine", hint="leave out --offline")
        yield server
        return
    with open_local_server(name, request.serve_flags) as url:
        ui.note(f"{name} is served at {url} during the measurement")
        yield replace(server, base_url=parse_base_url(url))


def _advance_by_one(bar: ProgressBar) -> Callable[[], None]:
    return lambda: bar.advance(1)


def _environment(
    server_session: ServerSession, request: LoadRequest, began: str
) -> output.LoadEnvironment:
    server = server_session.client.server
    parts = urlsplit(server.base_url)
    where = (
        f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}"
        if parts.port
        else server.base_url
    )
    return output.LoadEnvironment(
        where,
        server.model,
        request.prompts.mix,
        request.prompts.source(request.seed).lengths,
        request.target.endpoint,
        str(request.search.limits or ""),
        "http",
        host.cpu_name(),
        began,
        request.seed,
    )


def _save_results(result: LoadResult, config: Config, ui: UI) -> None:
    """Save the metrics of every load to the history. If saving fails, print a warning and
    continue.
    """
    machine = host.machine_identity()
    rows = [(result.environments[0], metrics) for metrics in result.measured]
    rows += [
        (environment, metrics)
        for pair in result.comparisons
        for environment, metrics in zip(result.environments, (pair.a, pair.b), strict=True)
    ]
    rows += [
        (result.environments[0], best)
        for search_result in result.max_loads
        if (best := search_result.best_metrics)
    ]
    runs = [
        history.BenchRun(
            environment.start_time,
            machine,
            environment.build,
            environment.model,
            None,
            environment.server,
            output.test_title(environment, metrics),
            output.build_row(environment, metrics),
        )
        for environment, metrics in rows
        if all(rate > 0 for rate in metrics.repetition_rates)
    ]
    if not runs:
        return
    try:
        history.History(history.history_path(config), ui).append(runs)
    except UserError as error:
        ui.warn(f"these results were not saved: {error} ({error.hint})")
