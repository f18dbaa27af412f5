"""`serve` with the model in other processes: one that is restarted when llama.cpp aborts (--rpc),
or Ray Serve replicas (--replicas).
"""

import secrets
from contextlib import closing
from dataclasses import replace
from functools import partial
from socket import socket as Socket
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.commands.flags import Flags
    from llmcli.commands.serve import Wish
    from llmcli.serve.settings import Settings

HERE = "local"  # --ray: a Ray cluster of this process on this machine


def run(request: "Wish", socket: Socket) -> str:
    """Serve from a child process until a signal arrives; return the signal's name.

    Raises UserError if the model cannot be opened at first.
    """
    from llmcli.commands.serve import opened, tell
    from llmcli.serve import server
    from llmcli.serve.child import Child
    from llmcli.serve.front import Front

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
    from llmcli.commands.serve import opened, tell
    from llmcli.serve import server
    from llmcli.serve.front import Front

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
    from llmcli.serve.replicas import Crew, running

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


def need_ray(local: bool) -> None:
    """Import Ray; raises UserError if it is not installed.

    Ray listens on all addresses of a machine and executes what it receives. A local cluster
    therefore accepts only this process, by a token that must be set before the import.
    """
    from llmcli import config

    config.quiet_ray(secrets.token_hex(32) if local else None)
    try:
        import llmcli.serve.replicas  # noqa: F401 (imports everything that replicas need)
    except ImportError:
        raise UserError("Ray is not installed", hint="pip install 'llmcli[ray]'") from None


def shared(given: "Flags", replicas: int) -> "Flags":
    """Divide the cores among the replicas of one machine; more threads than cores are slow."""
    from llmcli.hardware import host

    if given.options.threads is not None:
        return given
    return replace(given, options=replace(given.options, threads=max(1, host.cores() // replicas)))


def _build_settings(request: "Wish", facts: dict[str, Any]) -> "Settings":
    """Return the settings of the front server, with the model names that its process reported."""
    from llmcli.serve.settings import Settings

    return Settings(**{**request.settings, "names": tuple(facts["names"])})
