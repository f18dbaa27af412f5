"""`llmcli doctor`: look at the machine and the build, and print it. What is looked at is
hardware/checkup.py's.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.show import Json, start

if TYPE_CHECKING:
    from llmcli.bench.bandwidth import Reading
    from llmcli.catalog.reach import Reached
    from llmcli.hardware.checkup import Checkup
    from llmcli.hardware.cluster import Worker
    from llmcli.ui import UI

Network = Annotated[
    bool, typer.Option("--network", help="Ask the hub and the package index whether they answer.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    network: Network = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    rpc: Annotated[
        str | None, typer.Option("--rpc", metavar="HOST:PORT,…", help="Ask these workers, too.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Ask this Ray cluster, too.")
    ] = None,
    json: Json = False,
) -> None:
    """Tell what this machine has, what llama.cpp was built for, and what lies where.

    Nothing goes over the network without --network, --rpc or --ray. It ends with 1 where llama.cpp
    does not load, or a worker or cluster that was named does not answer.
    """
    from llmcli.catalog import reach
    from llmcli.hardware import checkup, cluster

    config, ui = start(json, offline)
    workers = [cluster.ask(one) for one in cluster.endpoints(rpc)] if rpc is not None else None
    cluster_found = _cluster(ray) if ray is not None else None
    reached = reach.look(config) if network else None
    found = checkup.look(config)
    reading = _read(found)
    if json:
        ui.result({**document(found, reading, reached, workers), "ray": cluster_found})
    else:
        _tell(found, reading, reached, ui)
        for one in workers or ():
            room = ", ".join(
                f"{_known(free)} of {_known(total)} free" for free, total in one.memory
            )
            ui.text(f"worker {one.endpoint}: protocol {'.'.join(map(str, one.protocol))} · {room}")
        if cluster_found:
            told = "machines {machines} · CPUs {cpus:g} · Ray {version}".format(**cluster_found)
            ui.text(f"Ray at {ray}: {told}")
    for what, hint in found.warnings:
        ui.warn(what)
        ui.note(f"hint: {hint}")
    if found.broken:
        raise typer.Exit(1)


def _cluster(address: str) -> dict[str, Any]:
    """What a Ray cluster has."""
    from llmcli.commands import apart

    apart.need_ray(local=False)
    from llmcli.serve import replicas

    found = replicas.look(address)
    return {
        "address": address,
        "machines": found.machines,
        "cpus": found.cpus,
        "memory_bytes": found.memory,
        "version": found.version,
    }


def _read(found: "Checkup") -> "Reading | None":
    """How fast memory is read, by all cores over what no cache holds; None where there is too
    little of it.
    """
    from llmcli.bench import bandwidth
    from llmcli.hardware import host

    cache = host.last_cache()
    nbytes = max(256 << 20, bandwidth.BEYOND * (cache or 0))
    if found.available is None or nbytes > found.available // 4:
        return None
    return bandwidth.measure(nbytes, host.cores(), rounds=2, seconds=0.05)


def document(
    found: "Checkup",
    reading: "Reading | None",
    reached: "list[Reached] | None",
    workers: "list[Worker] | None" = None,
) -> dict[str, Any]:
    """One JSON document; null is what this machine cannot tell, or what nobody asked for."""
    from llmcli.hardware import cpu, host

    return {
        "versions": found.versions,
        "cpu": {
            "name": host.cpu_name(),
            "cores": host.cores(),
            "last_cache_bytes": host.last_cache(),
            "load": found.load,
            "features": {one.name: {"cpu": one.cpu, "build": one.build} for one in found.features},
            "unused": list(cpu.idle(found.features)),
            "missing": list(cpu.missing(found.features)),
        },
        "backends": list(found.backends),
        "devices": [
            {
                "name": one.name,
                "description": one.description,
                "kind": one.kind,
                "free_bytes": one.free,
                "total_bytes": one.total,
            }
            for one in found.devices
        ],
        "memory": {
            "total_bytes": found.total,
            "available_bytes": found.available,
            "group_left_bytes": found.limit,
            "addresses_left_bytes": found.addresses,
            "read_bandwidth_bytes_per_second": None if reading is None else reading.best,
        },
        "folders": [
            {"what": one.what, "path": str(one.path), "bytes": one.nbytes, "files": one.files}
            for one in found.folders
        ],
        "network": None
        if reached is None
        else [
            {
                "what": one.what,
                "where": one.where,
                "reachable": not one.problem,
                "ms": one.ms,
                "problem": one.problem or None,
            }
            for one in reached
        ],
        "workers": None
        if workers is None
        else [
            {
                "endpoint": one.endpoint,
                "protocol": ".".join(map(str, one.protocol)),
                "devices": [
                    {"free_bytes": free, "total_bytes": total} for free, total in one.memory
                ],
            }
            for one in workers
        ],
        "warnings": [{"what": what, "hint": hint} for what, hint in found.warnings],
    }


def _tell(
    found: "Checkup", reading: "Reading | None", reached: "list[Reached] | None", ui: "UI"
) -> None:
    from llmcli.units import several, size

    ui.table(
        ("version", ""),
        [(name, number or "not installed") for name, number in found.versions.items()],
    )
    ui.text()
    _tell_cpu(found, ui)
    for one in found.devices:
        room = "" if one.kind == "cpu" else f" · {size(one.free)} of {size(one.total)} free"
        ui.text(f"device {one.name}: {one.description}{room}")
    memory = f"{_known(found.available)} of {_known(found.total)} are available"
    if found.limit is not None:
        memory += f" · the container leaves {size(found.limit)}"
    if found.addresses is not None:
        memory += f" · ulimit -v leaves {size(found.addresses)} of addresses"
    ui.text(f"memory: {memory}")
    speed = (
        "unknown: too little memory to read"
        if reading is None
        else f"{reading.best / 1e9:.1f} GB/s"
    )
    ui.text(f"reading memory: {speed} (a first look; `llmcli bench roofline` measures)")
    ui.text()
    ui.table(
        ("what is kept", "size", "files", "where"),
        [(one.what, size(one.nbytes), f"{one.files:,}", str(one.path)) for one in found.folders],
        right=("size", "files"),
    )
    for place in reached or ():
        answer = place.problem or f"answers, {place.ms:.0f} ms"
        ui.text(f"{place.what} ({place.where}): {answer}")
    if not found.warnings:
        ui.text(f"nothing is wrong: {several(len(found.features), 'CPU feature')} compared")


def _tell_cpu(found: "Checkup", ui: "UI") -> None:
    """The processor, and its features against the build's."""
    from llmcli.hardware import cpu, host

    cache = host.last_cache()
    ui.text(f"processor: {host.cpu_name()} · {host.cores()} cores · last cache {_known(cache)}")
    used = [one.name for one in found.features if one.build]
    ui.text(f"llama.cpp uses: {' '.join(used) or 'unknown'}" + (f" ({', '.join(found.backends)})"))
    for names, words in (
        (cpu.idle(found.features), "has, and llama.cpp does not use"),
        (cpu.missing(found.features), "lacks, and llama.cpp uses"),
    ):
        if names:
            ui.text(f"the processor {words}: {' '.join(names)}")


def _known(nbytes: int | None) -> str:
    from llmcli.units import size

    return "unknown" if nbytes is None else size(nbytes)
