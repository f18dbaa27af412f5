"""`llmcli doctor`: prints versions, devices, memory and stored files, and warns about problems of
this machine.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Json

if TYPE_CHECKING:
    from llmcli.bench.cost.memory_bandwidth import BandwidthReading
    from llmcli.bench.cost.weight_kernels import WeightKernel
    from llmcli.catalog.connectivity import ConnectivityCheck
    from llmcli.config import Config
    from llmcli.hardware.diagnostics import Diagnostics
    from llmcli.hardware.rpc_workers import RpcWorker
    from llmcli.ui import UI

Network = Annotated[
    bool, typer.Option("--network", help="Check whether the hub and the package index answer.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    network: Network = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    rpc: Annotated[
        str | None, typer.Option("--rpc", metavar="HOST:PORT,...", help="Also check these workers.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Also check this Ray cluster.")
    ] = None,
    list_devices: Annotated[
        bool, typer.Option("--list-devices", help="Only list the devices, as -dev takes them.")
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine, the build of llama.cpp, and stored files.

    The network is used only with --network, --rpc or --ray. The exit code is 1 if llama.cpp does
    not load, or if a given worker or cluster does not answer.
    """
    from llmcli.catalog import connectivity
    from llmcli.hardware import diagnostics, rpc_workers

    config, ui = start_command(json, offline)
    if list_devices:
        _list_devices(rpc, ui)
        return
    workers = (
        [rpc_workers.probe_worker(worker) for worker in rpc_workers.parse_endpoints(rpc)]
        if rpc is not None
        else None
    )
    ray_cluster = _read_cluster(ray) if ray is not None else None
    connections = connectivity.check_connectivity(config) if network else None
    checkup_result = diagnostics.run_diagnostics(config)
    reading = _measure_bandwidth(checkup_result)
    kernels = _measure_kernels(checkup_result, reading, config)
    if json:
        document = build_document(checkup_result, reading, kernels, connections, workers)
        ui.result({**document, "ray": ray_cluster})
    else:
        _print_checkup(checkup_result, reading, kernels, connections, ui)
        for worker in workers or ():
            memory_text = ", ".join(
                f"{_format_size(free)} of {_format_size(total)} free"
                for free, total in worker.memory
            )
            ui.text(
                f"worker {worker.endpoint}: protocol {'.'.join(map(str, worker.protocol))} · "
                f"{memory_text}"
            )
        if ray_cluster:
            summary = "machines {machines} · CPUs {cpus:g} · Ray {version}".format(**ray_cluster)
            ui.text(f"Ray at {ray}: {summary}")
    for warning, hint in checkup_result.warnings:
        ui.warn(warning)
        ui.note(f"hint: {hint}")
    if checkup_result.load_error:
        raise typer.Exit(1)


def _list_devices(rpc: str | None, ui: "UI") -> None:
    """Print the devices of this machine and of workers, in the order in which layers are put on
    them. `rpc`: addresses of workers.
    """
    from llmcli.model_loader.rpc_workers import join_workers
    from llmcli.planning.machine import read_machine
    from llmcli.runtime.binding.placement.devices import list_devices

    join_workers(rpc, ui)
    machine = read_machine()
    used = {device.name for device in machine.devices}
    if ui.json:
        ui.result(
            {
                "devices": [
                    {
                        **asdict(device),
                        "usable_bytes": device.usable_bytes,
                        "used": device.name in used,
                    }
                    for device in machine.all_devices
                ]
            }
        )
        return
    descriptions = {device.name: device.description for device in list_devices()}
    for device in machine.all_devices:
        unused = "" if device.name in used else "; only used if -dev names it"
        ui.text(
            f"{device.name}: {descriptions[device.name]} "
            f"({_format_size(device.free_bytes)} of {_format_size(device.total_bytes)} free, "
            f"{_format_size(device.usable_bytes)} for a model{unused})"
        )
    if not machine.all_devices:
        ui.text("no devices besides the processor")


def _read_cluster(address: str) -> dict[str, Any]:
    """Return the size of a Ray cluster as a JSON object. Raises UserError if it does not answer."""
    from llmcli.hardware.ray_cluster import require_ray

    require_ray(local=False)
    from llmcli.hardware.ray_cluster import read_cluster

    cluster_size = read_cluster(address)
    return {
        "address": address,
        "machines": cluster_size.machines,
        "cpus": cluster_size.cpus,
        "memory_bytes": cluster_size.memory,
        "version": cluster_size.version,
    }


def _measure_bandwidth(result: "Diagnostics") -> "BandwidthReading | None":
    """Measure the memory bandwidth with all cores. Returns None if there is too little free
    memory.
    """
    from llmcli.bench.cost import memory_bandwidth
    from llmcli.hardware import host

    cache = host.last_cache_bytes()
    nbytes = max(256 << 20, memory_bandwidth.MIN_CACHE_FACTOR * (cache or 0))
    if result.available_memory is None or nbytes > result.available_memory // 4:
        return None
    return memory_bandwidth.measure_bandwidth(nbytes, host.core_count(), rounds=2, seconds=0.05)


def _measure_kernels(
    result: "Diagnostics", reading: "BandwidthReading | None", config: "Config"
) -> "tuple[WeightKernel, ...]":
    """Measure how fast all cores multiply weights of each type. Return nothing if llama.cpp does not
    load, or there is too little free memory.
    """
    from llmcli.bench.cost import weight_kernels
    from llmcli.errors import UserError
    from llmcli.hardware import host

    if result.load_error or reading is None:
        return ()
    try:
        return weight_kernels.measure_kernels(
            host.core_count(), host.last_cache_bytes(), config, {}, lambda: None
        )
    except (UserError, MemoryError):  # of memory; the report has all that is known of it
        return ()


def build_document(
    result: "Diagnostics",
    reading: "BandwidthReading | None",
    kernels: "tuple[WeightKernel, ...]",
    connections: "list[ConnectivityCheck] | None",
    workers: "list[RpcWorker] | None" = None,
) -> dict[str, Any]:
    """Return the JSON document. Values are null if this machine cannot determine them or they were
    not requested.
    """
    from llmcli.commands.bench.reports.weight_kernels import build_kernel_rows
    from llmcli.hardware import cpu_features, host

    return {
        "versions": result.versions,
        "cpu": {
            "name": host.cpu_name(),
            "cores": host.core_count(),
            "last_cache_bytes": host.last_cache_bytes(),
            "load": result.load_average,
            "features": {
                entry.name: {"cpu": entry.in_cpu, "build": entry.in_build}
                for entry in result.features
            },
            "unused": list(cpu_features.unused_features(result.features)),
            "missing": list(cpu_features.unsupported_features(result.features)),
        },
        "backends": list(result.backends),
        "parts": [
            {
                "what": part.name,
                "active": part.is_active,
                "problem": part.problem or None,
                "without_it": part.without_it,
                "hint": part.remedy or None,
            }
            for part in result.parts
        ],
        "devices": [
            {
                "name": entry.name,
                "description": entry.description,
                "kind": entry.kind,
                "free_bytes": entry.free_bytes,
                "total_bytes": entry.total_bytes,
            }
            for entry in result.devices
        ],
        "gpus": [asdict(gpu) for gpu in result.gpus],
        "memory": {
            "total_bytes": result.total_memory,
            "available_bytes": result.available_memory,
            "group_left_bytes": result.memory_limit,
            "addresses_left_bytes": result.address_limit,
            "read_bandwidth_bytes_per_second": None if reading is None else reading.best_rate,
        },
        "weight_kernels": build_kernel_rows(kernels),
        "folders": [
            {
                "what": entry.label,
                "path": str(entry.path),
                "bytes": entry.nbytes,
                "files": entry.files,
            }
            for entry in result.folders
        ],
        "network": None
        if connections is None
        else [
            {
                "what": entry.name,
                "where": entry.host,
                "reachable": not entry.problem,
                "ms": entry.ms,
                "problem": entry.problem or None,
            }
            for entry in connections
        ],
        "workers": None
        if workers is None
        else [
            {
                "endpoint": entry.endpoint,
                "protocol": ".".join(map(str, entry.protocol)),
                "devices": [
                    {"free_bytes": free, "total_bytes": total} for free, total in entry.memory
                ],
            }
            for entry in workers
        ],
        "warnings": [{"what": what, "hint": hint} for what, hint in result.warnings],
    }


def _print_checkup(
    result: "Diagnostics",
    reading: "BandwidthReading | None",
    kernels: "tuple[WeightKernel, ...]",
    connections: "list[ConnectivityCheck] | None",
    ui: "UI",
) -> None:
    from llmcli.commands.bench.reports.weight_kernels import print_kernels
    from llmcli.hardware.gpu_usage import format_usage
    from llmcli.units import format_count, format_size

    ui.table(
        ("version", ""),
        [(name, number or "not installed") for name, number in result.versions.items()],
    )
    ui.text()
    _print_cpu(result, ui)
    _print_parts(result, ui)
    for entry in result.devices:
        free_text = (
            ""
            if entry.kind == "cpu"
            else f" · {format_size(entry.free_bytes)} of {format_size(entry.total_bytes)} free"
        )
        ui.text(f"device {entry.name}: {entry.description}{free_text}")
    for gpu in result.gpus:
        ui.text(format_usage(gpu))
    memory = (
        f"{_format_size(result.available_memory)} of {_format_size(result.total_memory)} available"
    )
    if result.memory_limit is not None:
        memory += f" · the container leaves {format_size(result.memory_limit)}"
    if result.address_limit is not None:
        memory += f" · ulimit -v leaves {format_size(result.address_limit)} of addresses"
    ui.text(f"memory: {memory}")
    speed = (
        "unknown: too little free memory to measure"
        if reading is None
        else f"{reading.best_rate / 1e9:.1f} GB/s"
    )
    ui.text(f"memory bandwidth: about {speed} (for a precise value: llmcli bench roofline)")
    if kernels and reading is not None:
        print_kernels(kernels, reading.best_rate, ui)
    ui.text()
    ui.table(
        ("stored files", "size", "files", "where"),
        [
            (entry.label, format_size(entry.nbytes), f"{entry.files:,}", str(entry.path))
            for entry in result.folders
        ],
        right=("size", "files"),
    )
    for connection in connections or ():
        answer = connection.problem or f"answers, {connection.ms:.0f} ms"
        ui.text(f"{connection.name} ({connection.host}): {answer}")
    if not result.warnings:
        ui.text(f"no problems found: {format_count(len(result.features), 'CPU feature')} compared")


def _print_cpu(result: "Diagnostics", ui: "UI") -> None:
    """Print the processor, the CPU features that llama.cpp uses, and features that only one of the
    two has.
    """
    from llmcli.hardware import cpu_features, host

    cache = host.last_cache_bytes()
    ui.text(
        f"processor: {host.cpu_name()} · {host.core_count()} cores · last cache {_format_size(cache)}"
    )
    used_features = [feature.name for feature in result.features if feature.in_build]
    ui.text(
        f"llama.cpp uses: {' '.join(used_features) or 'unknown'}"
        + (f" ({', '.join(result.backends)})")
    )
    for feature_names, description in (
        (cpu_features.unused_features(result.features), "has features that llama.cpp does not use"),
        (
            cpu_features.unsupported_features(result.features),
            "does not have features that llama.cpp uses",
        ),
    ):
        if feature_names:
            ui.text(f"the processor {description}: {' '.join(feature_names)}")


def _print_parts(result: "Diagnostics", ui: "UI") -> None:
    """Print which parts of the installation are active, and for each other part the reason, what
    is lost, and what to do.
    """
    from llmcli.hardware.build_parts import library_name

    warned = {hint for _, hint in result.warnings}
    active = [part.name for part in result.parts if part.is_active]
    if active:
        ui.text(
            f"active parts: {' · '.join(active)}" + (f" ({library_name()})" * bool(library_name()))
        )
    for part in result.parts:
        if not part.is_active:
            ui.text(f"not active: {part.name}: {part.problem}. Without it: {part.without_it}")
            if part.remedy and part.remedy not in warned:
                ui.text(f"  to get it: {part.remedy}")


def _format_size(nbytes: int | None) -> str:
    from llmcli.units import format_size

    return "unknown" if nbytes is None else format_size(nbytes)
