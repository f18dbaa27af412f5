"""`llmcli bench roofline`: measures the memory bandwidth, and how much of it a model uses."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import Json, Trust
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.report import ReportOptions, ReportSettings, show_report
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.bench.cost.weight_kernels import WeightKernel
    from llmcli.bench.roofline import MachineBandwidth, RooflinePoint, RooflineResult
    from llmcli.bench.speed.parameter_grid import SpeedTest
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader

Depths = Annotated[
    list[str] | None,
    typer.Option("-d", "--n-depth", help="Tokens already in the cache; default 0."),
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", min=1, help="Threads; default: the cores.")
]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]
Repetitions = Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Runs of each test.")]


def roofline(
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="REF",
            autocompletion=complete_models,
            help="A model; without it only memory is measured.",
        ),
    ] = None,
    n_depth: Depths = None,
    threads: Threads = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    repetitions: Repetitions = 3,
    *,
    reporting: ReportOptions,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    rpc: Annotated[str | None, typer.Option("--rpc", hidden=True)] = None,
) -> None:
    """Measure the memory bandwidth of the CPU, and how much of it a model reaches."""
    from llmcli.bench.roofline import measure_machine
    from llmcli.bench.speed.parameter_grid import SpeedTest
    from llmcli.commands.bench.reports.weight_kernels import print_kernels
    from llmcli.hardware import host
    from llmcli.planning import resolve_options
    from llmcli.runtime.requests.request import RunOptions

    if rpc is not None:
        raise UsageError(
            "bench roofline measures this machine's processor and memory, not workers",
            hint="llmcli bench REF --rpc …",
        )
    config, ui = start_command(json, offline, trust=trust)
    resolve_options.validate_options(
        RunOptions(threads=threads, cache_type_k=type_k, cache_type_v=type_v)
    )
    reporting.check_path()
    count = threads or host.core_count()
    with ui.bar("read memory", None, "tests") as bar:
        machine = measure_machine(count, lambda: bar.advance(1))
    if count >= host.core_count() and not _is_disturbed(machine):
        _save_bandwidth(machine, config, ui)
    measured = (
        None
        if ref is None
        else _measure(
            ref,
            machine,
            n_depth,
            SpeedTest(0, 0, 0, 2048, 512, type_k, type_v, count, 0, "auto"),
            repetitions,
            config,
            ui,
        )
    )
    result = measured[0] if measured else None
    kernels = _measure_kernels(count, machine, measured[1] if measured else None, config, ui)
    if json:
        ui.result(build_document(machine, kernels, result))
    else:
        _print_machine(machine, ui)
        if result:
            _print_model(result, ui)
        print_kernels(kernels, machine.bandwidth, ui)
    _show_charts(ref or "", machine, measured, reporting, ui)


def _save_bandwidth(machine: "MachineBandwidth", config: "Config", ui: "UI") -> None:
    """Save the memory bandwidth for later calls of `bench`. An error is ignored here, because
    `bench` reports it when it saves its results.
    """
    from contextlib import suppress

    from llmcli.bench.history.history import History, history_path
    from llmcli.errors import UserError
    from llmcli.hardware import host

    with suppress(UserError):
        History(history_path(config), ui).save_bandwidth(host.machine_identity(), machine.bandwidth)


def _measure(
    ref: str,
    machine: "MachineBandwidth",
    n_depth: list[str] | None,
    base_test: "SpeedTest",
    repetitions: int,
    config: "Config",
    ui: "UI",
) -> "tuple[RooflineResult, ModelHeader]":
    from llmcli.bench import roofline
    from llmcli.bench.speed import parameter_grid
    from llmcli.model_loader.prepare import prepare_model
    from llmcli.model_loader.rehearsal.rehearse import rehearse_model
    from llmcli.planning.measurements.product_trial import choose_products
    from llmcli.runtime import kv_size
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.binding.placement.model_placement import ON_HOST
    from quant.model_file import load_checks, read_header

    depths = parameter_grid.parse_numbers("-d", n_depth or ["0"])
    header = read_header.read_header(prepare_model(ref, None, config, ui).path)
    load_checks.check_loadable(header)
    rehearse_model(header, config, ui)
    kv_size.check_cache(header.metadata, base_test.type_k, base_test.type_v)
    placement = replace(
        ON_HOST, ggml_types=choose_products(header, ON_HOST, base_test.n_threads, config)
    )
    tests = len(depths) + len(roofline.UBATCH_SIZES)
    with (
        open_model(header.path, placement) as model,
        ui.bar(f"bench {header.path.name}", tests, "tests") as bar,
    ):
        return roofline.measure_model(
            model, header, machine, base_test, depths, repetitions, lambda: bar.advance(1)
        ), header


def _measure_kernels(
    threads: int,
    machine: "MachineBandwidth",
    header: "ModelHeader | None",
    config: "Config",
    ui: "UI",
) -> "tuple[WeightKernel, ...]":
    """Measure the products of all types of weights."""
    from llmcli.bench.cost import weight_kernels
    from llmcli.planning.measurements import product_trial
    from llmcli.runtime.binding.kernels.products import TYPES

    sizes = product_trial.weight_bytes(header) if header else {}
    with ui.bar("multiply weights", len(TYPES), "tests") as bar:
        return weight_kernels.measure_kernels(
            threads, machine.cache_bytes, config, sizes, lambda: bar.advance(1)
        )


def _show_charts(
    ref: str,
    machine: "MachineBandwidth",
    measured: "tuple[RooflineResult, ModelHeader] | None",
    reporting: ReportSettings,
    ui: "UI",
) -> None:
    """Draw the charts in the terminal, and write the HTML report."""
    from llmcli.bench import report_page
    from llmcli.bench.plots.roofline import build_bandwidth_chart

    if measured is None:
        show_report(lambda: report_page.build_machine_page(machine), list, reporting, ui)
        return
    result, header = measured
    show_report(
        lambda: report_page.build_test_page(
            ref, result.tests, header, machine.bandwidth, [build_bandwidth_chart(machine)]
        ),
        lambda: report_page.build_charts(result.tests, header, machine.bandwidth)[:1],
        reporting,
        ui,
    )


def build_document(
    machine: "MachineBandwidth",
    kernels: "tuple[WeightKernel, ...]",
    result: "RooflineResult | None",
) -> dict[str, Any]:
    """Return the JSON document. Values that this machine cannot determine are null."""
    from llmcli.commands.bench.reports.weight_kernels import build_kernel_rows
    from llmcli.runtime.binding.placement import devices

    machine_fields: dict[str, Any] = {
        "cpu_info": machine.cpu,
        "last_cache_bytes": machine.cache_bytes,
        "read_bandwidth_bytes_per_second": machine.bandwidth,
        "readings": [
            {
                "bytes": entry.nbytes,
                "threads": entry.threads,
                "bytes_per_second": list(entry.round_rates),
            }
            for entry in machine.readings
        ],
        "gpus": [
            {
                "name": entry.name,
                "description": entry.description,
                "read_bandwidth_bytes_per_second": None,
            }
            for entry in devices.list_devices()
            if entry.kind in devices.GPU_KINDS
        ],
        "weight_kernels": build_kernel_rows(kernels),
    }
    if result is None:
        return machine_fields
    return {
        **machine_fields,
        "prefill": {
            "tokens_per_second": result.prompt_rate,
            "n_ubatch": result.ubatch,
            "operations_per_second": result.operations_per_second,
            "ridge_operations_per_byte": result.ridge,
        },
        "decode": [_point_document(point, result) for point in result.points],
    }


def _point_document(point: "RooflinePoint", result: "RooflineResult") -> dict[str, Any]:
    roof, cost = result.machine.bandwidth, point.token_cost
    return {
        "n_depth": point.depth,
        "weights_bytes": dict(cost.weight_bytes),
        "kv_bytes": cost.kv_bytes,
        "bytes_per_token": cost.nbytes,
        "operations_per_token": None
        if cost.attention_operations is None
        else cost.weight_operations + cost.attention_operations,
        "intensity": cost.intensity,
        "attainable_tokens_per_second": point.attainable_rate(roof),
        "tokens_per_second": point.rate,
        "stddev_tokens_per_second": point.deviation,
        "roofline_fraction": point.achieved_fraction(roof),
        "fits_last_cache": point.fits_cache(result.machine.cache_bytes),
        "batch_leaving_memory_bound": point.compute_bound_sequences(result.ridge),
    }


def _print_machine(machine: "MachineBandwidth", ui: "UI") -> None:
    from llmcli.units import format_size

    cache = "unknown" if machine.cache_bytes is None else format_size(machine.cache_bytes)
    ui.text(f"{machine.cpu} · last cache {cache}")
    rows = [
        (
            format_size(reading.nbytes),
            str(reading.threads),
            f"{reading.best_rate / 1e9:.1f}",
            f"{min(reading.round_rates) / 1e9:.1f}",
        )
        for reading in machine.readings
    ]
    ui.table(
        ("read", "threads", "GB/s", "slowest round"),
        rows,
        right=("read", "threads", "GB/s", "slowest round"),
    )
    if machine.bandwidth is None:
        ui.text(
            "the memory bandwidth is unknown: everything that was read may fit into the last cache"
        )
    else:
        ui.text(f"memory bandwidth: {machine.bandwidth / 1e9:.1f} GB/s")
    if _is_disturbed(machine):
        ui.warn(
            "rounds differ by more than 30 % because something else uses this machine; "
            "the results are too low"
        )
    ui.text()


def _is_disturbed(machine: "MachineBandwidth") -> bool:
    return any(min(reading.round_rates) < 0.7 * reading.best_rate for reading in machine.readings)


def _print_model(result: "RooflineResult", ui: "UI") -> None:
    from llmcli.units import format_size

    roof = result.machine.bandwidth
    ui.text(
        f"prompts: {result.prompt_rate:.1f} tok/s with -ub {result.ubatch}"
        f"{_format_operations(result.operations_per_second)}"
    )
    rows = []
    for point in result.points:
        cost, attainable, fraction = (
            point.token_cost,
            point.attainable_rate(roof),
            point.achieved_fraction(roof),
        )
        rows.append(
            (
                str(point.depth),
                format_size(sum(cost.weight_bytes.values())),
                _format_known(cost.kv_bytes, format_size),
                _format_known(cost.intensity, lambda value: f"{value:.2f}"),
                _format_known(attainable, lambda value: f"{value:.1f}"),
                f"{point.rate:.1f} ± {point.deviation:.1f}",
                _format_known(fraction, lambda value: f"{value:.0%}"),
            )
        )
    columns = (
        "depth",
        "weights",
        "KV",
        "op/byte",
        "attainable tok/s",
        "measured tok/s",
        "share",
    )
    ui.table(columns, rows, right=columns)
    for point in result.points:
        ui.text(f"depth {point.depth}: {_describe_limit(point, result)}")


def _format_operations(operations: float | None) -> str:
    return "" if operations is None else f", {operations / 1e9:.1f} billion operations/s"


def _describe_limit(point: "RooflinePoint", result: "RooflineResult") -> str:
    """Describe in a sentence whether memory or arithmetic limits the speed of generation at one
    depth.
    """
    ridge, intensity = result.ridge, point.token_cost.intensity
    if ridge is None or intensity is None:
        return "the limiting factor is unknown"
    if point.fits_cache(result.machine.cache_bytes):
        return (
            "the model may fit into the last cache: memory may not limit it, "
            "and more than 100 % is possible"
        )
    if intensity >= ridge:
        return (
            f"compute-bound: {intensity:.2f} operations per byte; "
            f"memory would limit it only below {ridge:.2f}"
        )
    batch = point.compute_bound_sequences(ridge)
    share = (point.token_cost.kv_bytes or 0) / (point.token_cost.nbytes or 1)
    batch_note = {
        None: "",
        0: "; at any number of sequences, because their KV grows with them",
    }.get(batch, f"; compute-bound from {batch} sequences at once")
    return f"memory-bound, {share:.0%} of the bytes are KV{batch_note}"


def _format_known(value: float | None, show: Any) -> str:
    return "unknown" if value is None else str(show(value))


BENCHES = (with_option_groups(roofline),)
