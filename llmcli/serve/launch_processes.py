"""`serve` with the model in other processes: one that is restarted when llama.cpp aborts (--rpc),
or Ray Serve replicas (--replicas).
"""

from contextlib import closing
from dataclasses import replace
from functools import partial
from socket import socket as Socket
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError
from llmcli.hardware.ray_cluster import HERE, need_ray
from llmcli.model_loader.run_flags import shared

if TYPE_CHECKING:
    from llmcli.api.server_settings import Settings
    from llmcli.serve.launch import Wish


def run(request: "Wish", socket: Socket) -> str:
    """Serve from a child process until a signal arrives; return the signal's name.

    Raises UserError if the model cannot be opened at first.
    """
    from llmcli.serve import server
    from llmcli.serve.launch import opened, tell
    from llmcli.serve.processes.front import Front
    from llmcli.serve.processes.supervised_process import Child

    with closing(Child(partial(opened, request), request.ui.note)) as child:
        child.start()
        settings = _build_settings(request, child.facts)

        def ready() -> None:
            child.keep()
            tell(settings, child.facts["n_ctx"], request.parallel, request.ui)

        return server.run(Front(child, settings), settings, socket, ready)


def run_replicas(request: "Wish", replicas: int, address: str | None, socket: Socket) -> str:
    """Serve from `replicas` Ray Serve replicas until a signal arrives; return the signal's name.

    Raises UserError or UsageError.
    """
    from llmcli.serve import server
    from llmcli.serve.launch import opened, tell
    from llmcli.serve.processes.front import Front

    if request.given.rpc:
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
    address = None if address == HERE else address
    need_ray(local=address is None)
    from llmcli.serve.processes.ray_replicas import Crew, running

    replica_request = (
        request if address else replace(request, given=shared(request.given, replicas))
    )
    # requests that wait here come after Ray's own queue
    replica_request = replace(replica_request, waiting=2 * request.parallel)
    with running(
        partial(opened, replica_request), Crew(replicas, address, request.parallel, request.waiting)
    ) as crew:
        facts = crew.facts()
        settings = _build_settings(request, facts)
        ready = partial(tell, settings, facts["n_ctx"], replicas * request.parallel, request.ui)
        return server.run(Front(crew, settings), settings, socket, ready)


def _build_settings(request: "Wish", facts: dict[str, Any]) -> "Settings":
    """Return the settings of the front server, with the model names that its process reported."""
    from llmcli.api.server_settings import Settings

    return Settings(**{**request.settings, "names": tuple(facts["names"])})
