"""Runs `llmcli serve` with the model in other processes: in a child process that is restarted when
llama.cpp aborts (`--rpc`), or in Ray Serve replicas (`--replicas`).
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from socket import socket as Socket
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError
from llmcli.hardware.ray_cluster import LOCAL_RAY, require_ray
from llmcli.model_loader.run_flags import split_threads

if TYPE_CHECKING:
    from llmcli.api.server_settings import ServerSettings
    from llmcli.serve.launch import ServeRequest


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


def _build_settings(request: "ServeRequest", facts: dict[str, Any]) -> "ServerSettings":
    """Return the settings of the front server. `facts`: what the model process reports about its
    model (the keys `names` and `n_ctx`).
    """
    from llmcli.api.server_settings import ServerSettings

    return ServerSettings(**{**request.settings, "names": tuple(facts["names"])})
