"""The work of `bench load`: open the servers, apply the loads and save the results. Options and
tables are in the command.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from llmcli.bench.history import history
from llmcli.bench.load import ab_comparison, client, max_load, output, session
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
from llmcli.types import ProgressBar
from llmcli.ui import UI
from llmcli.units import format_current_time


def run_load(request: LoadRequest, config: Config, ui: UI) -> LoadResult:
    """Measure what the request asks for, and save the results to the history. Raises UserError."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_server(name, request, config, ui)) for name in request.servers
        ]
        if request.prompts.is_generated and not request.prompts.shared:
            ui.note(
                "prompts are distinct: a prefix cache can reuse only the chat template "
                "(--shared makes prompts share more)"
            )
        result = asyncio.run(_measured(servers, request, ui))
    if request.keep_history:
        _keep(result, config, ui)
    return result


async def _measured(servers: Sequence[LoadTarget], request: LoadRequest, ui: UI) -> LoadResult:
    began, rules = format_current_time(), request.search_rules
    async with AsyncExitStack() as stack:
        open_ = [
            await stack.enter_async_context(
                session.open_session(server, request.prompts.source(request.seed))
            )
            for server in servers
        ]
        worlds = tuple(_environment(one, request, began) for one in open_)
        if rules:
            return LoadResult(worlds, max_loads=tuple(await _edges(open_[0], rules, request, ui)))
        if len(open_) > 1:
            return LoadResult(
                worlds, comparisons=tuple(await _beside((open_[0], open_[1]), request, ui))
            )
        return LoadResult(worlds, tuple(await _points(open_[0], request, ui)))


async def _points(server_session: ServerSession, request: LoadRequest, ui: UI) -> list[LoadMetrics]:
    loads, length = request.levels.loads, request.length
    found, turns = [], length.repetitions or 1
    total = length.total_requests(len(loads), turns)
    with ui.bar(f"load {server_session.model}", total, "requests") as bar:
        for at, load in enumerate(loads):
            bar.describe(f"load {server_session.model}: {load.name}")
            runs = [
                await server_session.run_load(
                    load, length.load_length, 1 + at * turns + turn, tick=_ticks(bar)
                )
                for turn in range(turns)
            ]
            found.append(compute_metrics(runs, request.search.limits))
    return found


async def _beside(
    sides: tuple[ServerSession, ServerSession], request: LoadRequest, ui: UI
) -> list[ServerComparison]:
    loads, length = request.levels.loads, request.length
    turns = length.repetitions or ab_comparison.DEFAULT_TURNS
    with ui.bar("compare", 2 * turns * len(loads), "tests") as bar:
        return [
            await ab_comparison.compare_servers(
                sides,
                load,
                length.load_length,
                turns,
                request.search.limits,
                1 + at * turns,
                _ticks(bar),
            )
            for at, load in enumerate(loads)
        ]


async def _edges(
    server_session: ServerSession, rules: MaxLoadSettings, request: LoadRequest, ui: UI
) -> list[MaxLoadResult]:
    found: list[MaxLoadResult] = []
    with ui.bar(f"search {server_session.model}", None, "tests") as bar:

        def tick(name: str) -> None:
            bar.describe(f"search {server_session.model}: {name}")
            bar.advance(1)

        for kind in request.search.kinds:
            # The server reaches about the same request rate at its largest concurrency.
            before = found[0].best_metrics if found else None
            first = before.request_rate if before else None
            found.append(
                await max_load.find_max_load(
                    server_session, kind, rules, first, 1 + 1000 * len(found), tick
                )
            )
    return found


@contextmanager
def _server(name: str, request: LoadRequest, config: Config, ui: UI) -> Iterator[LoadTarget]:
    """Yield the server at an address, or start a server for a model and stop it after the block.
    Raises UserError.
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
        server = replace(server, base_url=client.parse_base_url(name))
        if config.offline and not server.is_local:
            raise UserError(f"{name} is not this machine", hint="leave out --offline")
        yield server
        return
    with open_local_server(name, request.serve_flags) as url:
        ui.note(f"{name} is served at {url} during the measurement")
        yield replace(server, base_url=client.parse_base_url(url))


def _ticks(bar: ProgressBar) -> Callable[[], None]:
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


def _keep(result: LoadResult, config: Config, ui: UI) -> None:
    """Save every load to the history. If saving fails, print a warning and continue."""
    machine = host.machine_identity()
    rows = [(result.environments[0], one) for one in result.measured]
    rows += [
        (world, one)
        for pair in result.comparisons
        for world, one in zip(result.environments, (pair.a, pair.b), strict=True)
    ]
    rows += [
        (result.environments[0], best) for one in result.max_loads if (best := one.best_metrics)
    ]
    runs = [
        history.BenchRun(
            world.start_time,
            machine,
            world.build,
            world.model,
            None,
            world.server,
            output.test_title(world, one),
            output.build_row(world, one),
        )
        for world, one in rows
        if all(rate > 0 for rate in one.repetition_rates)
    ]
    if not runs:
        return
    try:
        history.History(history.history_path(config), ui).append(runs)
    except UserError as error:
        ui.warn(f"these results were not saved: {error} ({error.hint})")
