"""Runs `llmcli serve` with models in other processes: in a child process that is restarted when
llama.cpp aborts (`--rpc`), in Ray Serve replicas (`--replicas`), or several models, each in its own
process.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from socket import socket as Socket
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError, UserError
from llmcli.hardware.ray_cluster import LOCAL_RAY, require_ray
from llmcli.model_loader.run_flags import split_threads
from llmcli.units import format_size

if TYPE_CHECKING:
    from llmcli.api.server_settings import ServerSettings
    from llmcli.serve.serve_request import ServeRequest
    from llmcli.ui import UI

DEFAULT_REF = "smollm2:135m"  # a small model, for hints
MAX_SHOWN_NAMES = 8  # models that the line about the start names


def run_child(request: "ServeRequest", listeners: Sequence[Socket]) -> str:
    """Start a child process that loads the model, and answer HTTP in this process until a signal
    arrives. Return the name of the signal, such as SIGTERM.

    Raises UserError if the model cannot be opened at the start.
    """
    from llmcli.serve import server
    from llmcli.serve.launch import open_service, print_ready
    from llmcli.serve.processes.front import FrontServer
    from llmcli.serve.processes.supervised_process import SupervisedProcess

    with closing(SupervisedProcess(partial(open_service, request), request.ui.note)) as child:
        child.start()
        settings = _build_settings(request, child.facts)

        def ready() -> None:
            child.supervise()
            print_ready(settings, child.facts["n_ctx"], request.parallel, request.ui)

        return server.run_server(FrontServer(child, settings), settings, listeners, ready)


def run_replicas(
    request: "ServeRequest", n_replicas: int, address: str | None, listeners: Sequence[Socket]
) -> str:
    """Serve with `n_replicas` Ray Serve replicas until a signal arrives. Return the name of the
    signal. `address`: the address of the Ray cluster; None or LOCAL_RAY: this machine.

    Raises UserError or UsageError.
    """
    from llmcli.serve import server
    from llmcli.serve.launch import open_service, print_ready
    from llmcli.serve.processes.front import FrontServer

    if request.run_flags.placement.rpc:
        raise UsageError(
            "an RPC worker serves one client, not several replicas",
            hint="leave out --replicas or --rpc",
        )
    if address and "://" in address:
        raise UsageError(
            "a Ray client address cannot serve",
            hint="run on a machine of the cluster with --ray auto",
        )
    if request.settings["grpc_port"] is not None:
        raise UsageError(
            "--grpc-port needs the model in this process", hint="leave out --replicas and --ray"
        )
    address = None if address == LOCAL_RAY else address
    require_ray(local=address is None)
    from llmcli.serve.processes.ray_replicas import ReplicaSettings, open_replicas

    replica_request = (
        request
        if address
        else replace(request, run_flags=split_threads(request.run_flags, n_replicas))
    )
    # this limit is only for the queue inside a replica; the user's limit applies to Ray's queue
    replica_request = replace(replica_request, max_waiting=2 * request.parallel)
    with open_replicas(
        partial(open_service, replica_request),
        ReplicaSettings(n_replicas, address, request.parallel, request.max_waiting),
    ) as running_replicas:
        facts = running_replicas.facts()
        settings = _build_settings(request, facts)
        ready = partial(
            print_ready, settings, facts["n_ctx"], n_replicas * request.parallel, request.ui
        )
        return server.run_server(
            FrontServer(running_replicas, settings), settings, listeners, ready
        )


def run_models(
    request: "ServeRequest",
    refs: Sequence[str],
    limit_bytes: int | None,
    keep_alive: float,
    listeners: Sequence[Socket],
) -> str:
    """Serve several models until a signal arrives, and return the name of the signal. `refs`: the
    models; empty: all that are on this disk. `limit_bytes`: the most memory of all together; None:
    what is free now. `keep_alive`: seconds for which an idle model stays loaded.

    Raises UserError if there is no model, or if one of `refs` cannot be prepared.
    """
    from llmcli.hardware import host
    from llmcli.model_loader.prepare import prepare_model
    from llmcli.serve import server
    from llmcli.serve.launch import open_service, predict_service
    from llmcli.serve.processes.interpreter import start_fork_server
    from llmcli.serve.processes.models.admitted_process import AdmittedProcess
    from llmcli.serve.processes.models.model_pool import ModelPool
    from llmcli.serve.processes.models.models_front import ModelsFront
    from llmcli.serve.processes.models.pool_state import PoolSettings
    from llmcli.serve.processes.models.served_models import find_served_models, prepared_refs

    for ref in prepared_refs(
        refs, request.config
    ):  # downloads and quantizes what is missing, as for a single model
        prepare_model(ref, None, request.config, request.ui)
    # nothing is downloaded later, because a request must not wait for that
    request = replace(request, config=replace(request.config, offline=True))
    limit_bytes = limit_bytes or host.available_memory()
    if limit_bytes is None:
        raise UserError("the free memory is unknown", hint="give --memory-limit SIZE")
    # the front server answers batches and gRPC, and the processes of the models know nothing of them
    model_settings = {**request.settings, "files_folder": None, "grpc_port": None}
    find_models = partial(find_served_models, refs, replace(request, settings=model_settings))
    if not find_models():
        raise UserError("no model is here", hint=f"llmcli serve {DEFAULT_REF}")
    settings = _build_settings(request, {"names": tuple(refs) or ("llmcli",)})
    start_fork_server()  # imports the modules before the first request

    def make_process(model_request: "ServeRequest") -> AdmittedProcess:
        return AdmittedProcess(
            partial(predict_service, model_request), partial(open_service, model_request)
        )

    default_name = refs[0] if refs else None

    async def serve() -> str:
        pool = ModelPool(
            find_models,
            make_process,
            PoolSettings(limit_bytes, keep_alive, default_name, settings.keys),
            request.ui.note,
        )

        def ready() -> None:
            pool.start()
            print_models_ready(settings, sorted(pool.models), limit_bytes, request.ui)

        front = ModelsFront(pool, settings)
        http_server = server.make_server(front, settings, ready)
        await front.batches.start()
        try:
            await http_server.serve(list(listeners))
        finally:
            await front.batches.stop()
            await pool.close()
            front.batches.close()
        return http_server.stop_signal

    return asyncio.run(serve())


def print_models_ready(
    settings: "ServerSettings", names: Sequence[str], limit_bytes: int, ui: "UI"
) -> None:
    """Print that the server of several models is ready; as a JSON object with `--json`."""
    from llmcli.serve import server

    url = server.server_url(settings)
    if ui.json:
        ui.result(
            {
                "url": url,
                "host": settings.host,
                "port": settings.port,
                "pid": os.getpid(),
                "models": list(names),
                "memory_limit_bytes": limit_bytes,
                **({} if settings.grpc_port is None else {"grpc_port": settings.grpc_port}),
            }
        )
    else:
        shown = ", ".join(names[:MAX_SHOWN_NAMES])
        more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
        grpc_note = "" if settings.grpc_port is None else f", gRPC on port {settings.grpc_port}"
        ui.note(
            f"{shown}{more}: served at {url}/v1{grpc_note}, in at most {format_size(limit_bytes)} ·"
            " Ctrl-C stops"
        )


def _build_settings(request: "ServeRequest", facts: dict[str, Any]) -> "ServerSettings":
    """Return the settings of the front server. `facts`: what the model process reports about its
    model (the keys `names` and `n_ctx`).
    """
    from llmcli.api.server_settings import ServerSettings

    return ServerSettings(**{**request.settings, "names": tuple(facts["names"])})
