"""`bench load` without its options and tables: opens the servers, applies the loads, saves the
results.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmcli import config as configuration
from llmcli.bench.history import history
from llmcli.bench.load import ab_comparison, level_search, max_load, mixes, output, session, slo
from llmcli.bench.load import client as clients
from llmcli.bench.load.ab_comparison import Versus
from llmcli.bench.load.client import Server
from llmcli.bench.load.generator import Load
from llmcli.bench.load.local_server import served
from llmcli.bench.load.max_load import Edge, Rules
from llmcli.bench.load.metrics import Figures, figures
from llmcli.bench.load.request import DEFAULT_PERCENT, DEFAULT_USERS, MAX_LOAD_KINDS, LoadRequest
from llmcli.bench.load.result import LoadResult
from llmcli.bench.load.session import Session
from llmcli.bench.speed import parameter_grid
from llmcli.commands.bench import load_report
from llmcli.config import Config
from llmcli.errors import UsageError, UserError
from llmcli.hardware import host
from llmcli.types import Bar
from llmcli.ui import UI


def run_load(
    a: str,
    b: str | None,
    request: LoadRequest,
    output_format: str,
    report_and_chart: tuple[Path | None, bool | None],
) -> None:
    """Measure, save to the history, and print. Raises UserError or UsageError."""
    if output_format not in output.FORMATS:
        raise UsageError(
            f"-o {output_format!r} is unknown", hint=f"-o takes: {' '.join(output.FORMATS)}"
        )
    # a mistake in the options is reported before anything is measured
    loads, promise = _loads(request), request.limits
    rules = _rules(request) if request.find_max else None
    _check([name for name in (a, b) if name], rules, request)
    config = configuration.load()
    config = replace(config, offline=config.offline or request.offline)
    ui = UI(json=output_format != "md", color=config.color)
    body = _body(request.body)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_server(name, request, body, config, ui)) for name in (a, b) if name
        ]
        if request.mix in mixes.mixes() and not request.shared:
            ui.note(
                "prompts are distinct: a prefix cache can reuse only the chat template "
                "(--shared makes prompts share more)"
            )
        result = asyncio.run(_measured(servers, loads, rules, request, ui))
    if not request.no_history:
        _keep(result, config, ui)
    load_report.print_results(result, output_format, promise, rules, report_and_chart, ui)


async def _measured(
    servers: Sequence[Server],
    loads: Sequence[Load],
    rules: Rules | None,
    request: LoadRequest,
    ui: UI,
) -> LoadResult:
    began = history.now()
    async with AsyncExitStack() as stack:
        open_ = [
            await stack.enter_async_context(session.opened(server, request.prompts))
            for server in servers
        ]
        worlds = tuple(_environment(one, request, began) for one in open_)
        if rules:
            return LoadResult(worlds, max_loads=tuple(await _edges(open_[0], rules, request, ui)))
        if len(open_) > 1:
            return LoadResult(
                worlds, comparisons=tuple(await _beside((open_[0], open_[1]), loads, request, ui))
            )
        return LoadResult(worlds, tuple(await _points(open_[0], loads, request, ui)))


async def _points(
    server_session: Session, loads: Sequence[Load], request: LoadRequest, ui: UI
) -> list[Figures]:
    found, turns = [], request.repetitions or 1
    with ui.bar(f"load {server_session.model}", _total(loads, request, turns), "requests") as bar:
        for at, load in enumerate(loads):
            bar.describe(f"load {server_session.model}: {load.name}")
            runs = [
                await server_session.run(
                    load, request.load_length, 1 + at * turns + turn, tick=_ticks(bar)
                )
                for turn in range(turns)
            ]
            found.append(figures(runs, request.limits))
    return found


async def _beside(
    sides: tuple[Session, Session], loads: Sequence[Load], request: LoadRequest, ui: UI
) -> list[Versus]:
    turns = request.repetitions or ab_comparison.TURNS
    with ui.bar("compare", 2 * turns * len(loads), "tests") as bar:
        return [
            await ab_comparison.versus(
                sides, load, request.load_length, turns, request.limits, 1 + at * turns, _ticks(bar)
            )
            for at, load in enumerate(loads)
        ]


async def _edges(server_session: Session, rules: Rules, request: LoadRequest, ui: UI) -> list[Edge]:
    assert request.find_max is not None
    wanted: list[max_load.Kind] = (
        ["concurrency", "rate"] if request.find_max == "both" else [_kind(request.find_max)]
    )
    found: list[Edge] = []
    with ui.bar(f"search {server_session.model}", None, "tests") as bar:

        def tick(name: str) -> None:
            bar.describe(f"search {server_session.model}: {name}")
            bar.advance(1)

        for kind in wanted:
            # the request rate at the largest concurrency is close to the largest rate
            before = found[0].best if found else None
            first = before.request_rate if before else None
            found.append(
                await max_load.find(server_session, kind, rules, first, 1 + 1000 * len(found), tick)
            )
    return found


@contextmanager
def _server(
    name: str, request: LoadRequest, body: dict[str, Any], config: Config, ui: UI
) -> Iterator[Server]:
    """Yield a server by its address, or start one for a model. Raises UserError."""
    key = request.api_key
    if request.api_key_file:
        key = _key(request.api_key_file)
    extra = {
        "temperature": 0,
        **({} if request.mix not in mixes.mixes() else {"ignore_eos": True}),
        **body,
    }
    made = Server(
        "",
        request.model,
        key,
        request.endpoint == "chat",
        extra,
        request.cacert,
        request.insecure,
        request.timeout,
    )
    if "://" in name:
        made = replace(made, base=clients.base(name))
        if config.offline and not made.here:
            raise UserError(f"{name} is not this machine", hint="leave out --offline")
        yield made
        return
    with served(name, _flags(request.serve)) as url:
        ui.note(f"{name} is served at {url} during the measurement")
        yield replace(made, base=clients.base(url))


def _check(names: Sequence[str], rules: Rules | None, request: LoadRequest) -> None:
    if request.endpoint not in ("chat", "completions"):
        raise UsageError(
            f"--endpoint {request.endpoint!r} is unknown",
            hint="--endpoint takes: chat completions",
        )
    if request.api_key and request.api_key_file:
        raise UsageError("two keys given", hint="leave out --api-key or --api-key-file")
    if request.shared and request.mix not in mixes.mixes():
        raise UsageError(
            f"--shared applies to generated prompts, not to {request.mix}",
            hint="leave out --shared",
        )
    if request.serve and all("://" in name for name in names):
        raise UsageError(
            f"--serve applies to a server that llmcli starts, but {names[0]} is running already",
            hint="leave out --serve",
        )
    if request.burstiness is not None and request.arrivals != "gamma":
        raise UsageError(
            "--burstiness needs --arrivals gamma",
            hint="add --arrivals gamma, or leave out --burstiness",
        )
    if request.arrivals and not (request.rate or request.find_max in ("rate", "both")):
        raise UsageError(
            "--arrivals applies to an open loop, and none is measured", hint="add --rate 0.5,1,2"
        )
    if not rules:
        if request.percent is not None:
            raise UsageError(
                "--percent needs --find-max", hint="add --find-max both, or leave out --percent"
            )
        return
    if len(names) > 1:
        raise UsageError("--find-max works on one server", hint="leave out --against")
    for flag, value in (("--concurrency", request.concurrency), ("--rate", request.rate)):
        if value:
            raise UsageError(
                f"--find-max chooses the loads itself, so {flag} does not apply",
                hint=f"leave out {flag}",
            )


def _loads(request: LoadRequest) -> list[Load]:
    """Return the loads given by --concurrency and --rate. Raises UsageError or UserError."""
    loop, users = (
        request.open_loop,
        request.concurrency or ([] if request.rate else [DEFAULT_USERS]),
    )
    closed = [
        Load("closed", count)
        for count in (parameter_grid.numbers("--concurrency", users, 1, 10_000) if users else [])
    ]
    return closed + [replace(loop, level=rate) for rate in _rates(request.rate or [])]


def _rates(texts: Sequence[str]) -> list[float]:
    found = []
    for word in ",".join(texts).split(",") if texts else ():
        try:
            rate = float(word)
        except ValueError:
            rate = 0.0
        if not 0 < rate <= 1e5:
            raise UserError(
                f"--rate {word!r} is invalid", hint="--rate 0.5,1,2 (requests per second)"
            )
        found.append(rate)
    return found


def _rules(request: LoadRequest) -> Rules:
    if request.find_max not in MAX_LOAD_KINDS:
        raise UsageError(
            f"--find-max {request.find_max!r} is unknown",
            hint=f"--find-max takes: {' '.join(MAX_LOAD_KINDS)}",
        )
    if request.limits is None:
        raise UsageError("--find-max needs --slo", hint=slo.HINT)
    percent, loop = (
        DEFAULT_PERCENT if request.percent is None else request.percent,
        request.open_loop,
    )
    return Rules(
        request.limits,
        percent / 100,
        request.requests or max_load.LEAST,
        request.seconds,
        request.warmup,
        request.repetitions or level_search.MOST,
        loop.arrivals,
        loop.burstiness,
    )


def _kind(word: str) -> max_load.Kind:
    return "concurrency" if word == "concurrency" else "rate"


def _flags(text: str) -> list[str]:
    import shlex

    try:
        return shlex.split(text)
    except ValueError:
        raise UsageError(
            f"--serve has an unclosed quote: {text!r}", hint="--serve '-t 2 -np 8'"
        ) from None


def _body(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"--body is not a JSON object: {text[:80]!r}", hint="""--body '{"temperature": 0.7}'"""
        )
    return found


def _key(path: Path) -> str:
    """Return the first word of a key file. Raises UserError."""
    try:
        lines = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"cannot read {path}: {why}", hint="--api-key-file takes a file that contains a key"
        ) from None
    if not lines:
        raise UserError(
            f"{path} contains no key", hint="--api-key-file takes a file that contains a key"
        )
    return lines[0]


def _total(loads: Sequence[Load], request: LoadRequest, turns: int) -> int | None:
    count = request.load_length.requests
    return None if count is None or request.seconds else count * len(loads) * turns


def _ticks(bar: Bar) -> Callable[[], None]:
    return lambda: bar.advance(1)


def _environment(server_session: Session, request: LoadRequest, began: str) -> output.World:
    server = server_session.client.server
    parts = urlsplit(server.base)
    where = (
        f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}" if parts.port else server.base
    )
    return output.World(
        where,
        server.model,
        request.mix,
        request.prompts.shape,
        request.endpoint,
        str(request.limits or ""),
        "http",
        host.cpu_name(),
        began,
        request.seed,
    )


def _keep(result: LoadResult, config: Config, ui: UI) -> None:
    """Save every load to the history; if that fails, print a warning and keep the results."""
    machine = host.identity()
    rows = [(result.environments[0], one) for one in result.measured]
    rows += [
        (world, one)
        for pair in result.comparisons
        for world, one in zip(result.environments, (pair.a, pair.b), strict=True)
    ]
    rows += [(result.environments[0], best) for one in result.max_loads if (best := one.best)]
    runs = [
        history.Run(
            world.began,
            machine,
            world.build,
            world.model,
            None,
            world.server,
            output.title(world, one),
            output.document(world, one),
        )
        for world, one in rows
        if all(rate > 0 for rate in one.samples)
    ]
    if not runs:
        return
    try:
        history.History(history.path(config), ui).append(runs)
    except UserError as error:
        ui.warn(f"these results were not saved: {error} ({error.hint})")
