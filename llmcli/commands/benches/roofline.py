"""`llmcli bench roofline`: parse, measure memory and a model, print how far one is from the other."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.reporting import Charts, Report
from llmcli.commands.show import Json, start
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.bench.roofline import Machine, Point, Result
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.container import Header

Depths = Annotated[
    list[str] | None, typer.Option("-d", "--n-depth", help="Tokens in the cache before; default 0.")
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", min=1, help="Threads; default: the cores.")
]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]
Repetitions = Annotated[
    int, typer.Option("-r", "--repetitions", min=1, help="How often each test runs.")
]


def roofline(
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="A model; without one only memory is read.")
    ] = None,
    n_depth: Depths = None,
    threads: Threads = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    repetitions: Repetitions = 3,
    report_file: Report = None,
    chart: Charts = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
    rpc: Annotated[str | None, typer.Option("--rpc", hidden=True)] = None,
) -> None:
    """Measure how fast memory is read, and what part of that a model's tokens reach, on the CPU."""
    from llmcli.bench import roofline as measuring
    from llmcli.commands import reporting
    from llmcli.hardware import fit, host
    from llmcli.runtime.request import RunOptions

    if rpc is not None:
        raise UsageError(
            "a roofline is of this machine's processor and memory, not of workers",
            hint="llmcli bench REF --rpc …",
        )
    config, ui = start(json, offline)
    fit.check(RunOptions(threads=threads, cache_type_k=type_k, cache_type_v=type_v))
    reporting.check(report_file)
    count = threads or host.cores()
    with ui.bar("read memory", None, "tests") as bar:
        machine = measuring.machine(count, lambda: bar.advance(1))
    if count >= host.cores() and not _disturbed(machine):
        _keep(machine, config, ui)
    found = (
        None
        if ref is None
        else _measure(ref, machine, n_depth, (count, type_k, type_v), repetitions, config, ui)
    )
    result = found[0] if found else None
    if json:
        ui.result(document(machine, result))
    else:
        _tell_machine(machine, ui)
        if result:
            _tell_model(result, ui)
    _draw(ref or "", machine, found, (report_file, chart), ui)


def _keep(machine: "Machine", config: "Config", ui: "UI") -> None:
    """What `bench` sets its rows beside; where it cannot be kept `bench` says why."""
    from contextlib import suppress

    from llmcli.bench.history import History, path
    from llmcli.errors import UserError
    from llmcli.hardware import host

    with suppress(UserError):
        History(path(config), ui).keep_bandwidth(host.identity(), machine.roof)


def _measure(
    ref: str,
    machine: "Machine",
    n_depth: list[str] | None,
    how: tuple[int, str, str],
    repetitions: int,
    config: "Config",
    ui: "UI",
) -> "tuple[Result, Header]":
    from llmcli.bench import grid, roofline
    from llmcli.commands.ready import ready
    from llmcli.runtime import kv
    from llmcli.runtime.binding.model import open_model
    from quant import container

    threads, type_k, type_v = how
    depths = grid.numbers("-d", n_depth or ["0"])
    header = container.read(ready(ref, None, config, ui).path)
    container.check(header)
    kv.check(header.metadata, type_k, type_v)
    base = grid.Test(0, 0, 0, 2048, 512, type_k, type_v, threads, 0, "auto")
    tests = len(depths) + len(roofline.UBATCHES)
    with (
        open_model(header.path, gpu_layers=0) as model,
        ui.bar(f"bench {header.path.name}", tests, "tests") as bar,
    ):
        return roofline.measure(
            model, header, machine, base, depths, repetitions, lambda: bar.advance(1)
        ), header


def _draw(
    ref: str,
    machine: "Machine",
    found: "tuple[Result, Header] | None",
    how: "tuple[Path | None, bool | None]",
    ui: "UI",
) -> None:
    """The pictures of what was printed: in the terminal, and on a page."""
    from llmcli.bench import page
    from llmcli.bench.pictures import roof
    from llmcli.commands import reporting

    if found is None:
        reporting.show(lambda: page.of_machine(machine), list, how, ui)
        return
    result, header = found
    reporting.show(
        lambda: page.of_tests(ref, result.tests, header, machine.roof, [roof.bandwidth(machine)]),
        lambda: page.charts(result.tests, header, machine.roof)[:1],
        how,
        ui,
    )


def document(machine: "Machine", result: "Result | None") -> dict[str, Any]:
    """One JSON document; null is what this machine cannot tell."""
    from llmcli.runtime.binding import devices

    told: dict[str, Any] = {
        "cpu_info": machine.cpu,
        "last_cache_bytes": machine.cache,
        "read_bandwidth_bytes_per_second": machine.roof,
        "readings": [
            {"bytes": one.nbytes, "threads": one.threads, "bytes_per_second": list(one.rates)}
            for one in machine.readings
        ],
        "gpus": [
            {
                "name": one.name,
                "description": one.description,
                "read_bandwidth_bytes_per_second": None,
            }
            for one in devices.devices()
            if one.kind in devices.GPUS
        ],
    }
    if result is None:
        return told
    return {
        **told,
        "prefill": {
            "tokens_per_second": result.prompt_rate,
            "n_ubatch": result.ubatch,
            "operations_per_second": result.operations,
            "ridge_operations_per_byte": result.ridge,
        },
        "decode": [_point(point, result) for point in result.points],
    }


def _point(point: "Point", result: "Result") -> dict[str, Any]:
    roof, cost = result.machine.roof, point.work
    return {
        "n_depth": point.depth,
        "weights_bytes": dict(cost.weights),
        "kv_bytes": cost.kv,
        "bytes_per_token": cost.nbytes,
        "operations_per_token": None
        if cost.attention is None
        else cost.operations + cost.attention,
        "intensity": cost.intensity,
        "attainable_tokens_per_second": point.attainable(roof),
        "tokens_per_second": point.rate,
        "stddev_tokens_per_second": point.deviation,
        "roofline_fraction": point.fraction(roof),
        "fits_last_cache": point.in_cache(result.machine.cache),
        "batch_leaving_memory_bound": point.leaving(result.ridge),
    }


def _tell_machine(machine: "Machine", ui: "UI") -> None:
    from llmcli.units import size

    cache = "unknown" if machine.cache is None else size(machine.cache)
    ui.text(f"{machine.cpu} · last cache {cache}")
    rows = [
        (size(one.nbytes), str(one.threads), f"{one.best / 1e9:.1f}", f"{min(one.rates) / 1e9:.1f}")
        for one in machine.readings
    ]
    ui.table(
        ("read", "threads", "GB/s", "slowest round"),
        rows,
        right=("read", "threads", "GB/s", "slowest round"),
    )
    if machine.roof is None:
        ui.text(
            "the speed of memory is unknown: nothing that was read is known to be beyond the last cache"
        )
    else:
        ui.text(f"memory gives {machine.roof / 1e9:.1f} GB/s")
    if _disturbed(machine):
        ui.warn(
            "rounds differ by more than 30 %: something else uses this machine, the figures are too low"
        )
    ui.text()


def _disturbed(machine: "Machine") -> bool:
    return any(min(one.rates) < 0.7 * one.best for one in machine.readings)


def _tell_model(result: "Result", ui: "UI") -> None:
    from llmcli.units import size

    roof = result.machine.roof
    ui.text(
        f"prompts: {result.prompt_rate:.1f} tok/s with -ub {result.ubatch}{_rate(result.operations)}"
    )
    rows = []
    for point in result.points:
        cost, most, share = point.work, point.attainable(roof), point.fraction(roof)
        rows.append(
            (
                str(point.depth),
                size(sum(cost.weights.values())),
                _known(cost.kv, size),
                _known(cost.intensity, lambda value: f"{value:.2f}"),
                _known(most, lambda value: f"{value:.1f}"),
                f"{point.rate:.1f} ± {point.deviation:.1f}",
                _known(share, lambda value: f"{value:.0%}"),
            )
        )
    columns = ("depth", "weights", "KV", "op/byte", "attainable tok/s", "reached tok/s", "of it")
    ui.table(columns, rows, right=columns)
    for point in result.points:
        ui.text(f"depth {point.depth}: {_bound(point, result)}")


def _rate(operations: float | None) -> str:
    return "" if operations is None else f", {operations / 1e9:.1f} G operations/s"


def _bound(point: "Point", result: "Result") -> str:
    """Which limit binds generation, in words."""
    ridge, intensity = result.ridge, point.work.intensity
    if ridge is None or intensity is None:
        return "which limit binds is unknown"
    if point.in_cache(result.machine.cache):
        return "all it reads may lie in the last cache: memory may be no limit, and more than 100 % be reached"
    if intensity >= ridge:
        return f"bound by operations: {intensity:.2f} a byte, and reading is the limit below {ridge:.2f} only"
    batch = point.leaving(ridge)
    share = (point.work.kv or 0) / (point.work.nbytes or 1)
    more = {None: "", 0: "; no number of sequences changes that, their KV grows along"}.get(
        batch, f"; from {batch} sequences at once on, by operations"
    )
    return f"bound by reading, of which KV is {share:.0%}{more}"


def _known(value: float | None, show: Any) -> str:
    return "unknown" if value is None else str(show(value))


BENCHES = (roofline,)
