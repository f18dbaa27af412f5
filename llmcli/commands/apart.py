"""`serve` where the model is in other processes: one that is started again when llama.cpp ends it
(--rpc), or several that Ray Serve looks after (--replicas).
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

HERE = "local"  # --ray: a Ray of our own on this machine


def run(wish: "Wish", socket: Socket) -> str:
    """Serve until a signal comes; its name. Raises UserError where the model does not open the
    first time.
    """
    from llmcli.commands.serve import opened, tell
    from llmcli.serve import server
    from llmcli.serve.child import Child
    from llmcli.serve.front import Front

    with closing(Child(partial(opened, wish), wish.ui.note)) as child:
        child.start()
        settings = _settings(wish, child.facts)

        def ready() -> None:
            child.keep()
            tell(settings, child.facts["n_ctx"], wish.parallel, wish.ui)

        return server.run(Front(child, settings), settings, socket, ready)


def run_replicas(wish: "Wish", replicas: int, address: str | None, socket: Socket) -> str:
    """The same over replicas."""
    from llmcli.commands.serve import opened, tell
    from llmcli.serve import server
    from llmcli.serve.front import Front

    if wish.given.rpc:
        raise UsageError(
            "a worker serves one client, not several replicas", hint="leave out --replicas or --rpc"
        )
    if address and "://" in address:
        raise UsageError(
            "a Ray client cannot serve", hint="start it on a machine of the cluster: --ray auto"
        )
    if wish.settings["grpc_port"] is not None:
        raise UsageError(
            "--grpc-port needs the model in this process", hint="leave out --replicas and --ray"
        )
    address = None if address == HERE else address
    need_ray(local=address is None)
    from llmcli.serve.replicas import Crew, running

    own = wish if address else replace(wish, given=shared(wish.given, replicas))
    own = replace(own, waiting=2 * wish.parallel)  # behind Ray's own queue
    with running(
        partial(opened, own), Crew(replicas, address, wish.parallel, wish.waiting)
    ) as crew:
        facts = crew.facts()
        settings = _settings(wish, facts)
        ready = partial(tell, settings, facts["n_ctx"], replicas * wish.parallel, wish.ui)
        return server.run(Front(crew, settings), settings, socket, ready)


def need_ray(local: bool) -> None:
    """Import Ray; raises UserError where it is not installed.

    It listens on all of a machine's addresses and runs what it is sent. One of our own takes that
    from us alone: by a token, which has to be there before the import.
    """
    from llmcli import config

    config.quiet_ray(secrets.token_hex(32) if local else None)
    try:
        import llmcli.serve.replicas  # noqa: F401 (all that it stands on)
    except ImportError:
        raise UserError("Ray is not installed here", hint="pip install 'llmcli[ray]'") from None


def shared(given: "Flags", replicas: int) -> "Flags":
    """On one machine each replica has its part of the cores: threads of two that wait for each
    other are slow.
    """
    from llmcli.hardware import host

    if given.options.threads is not None:
        return given
    return replace(given, options=replace(given.options, threads=max(1, host.cores() // replicas)))


def _settings(wish: "Wish", facts: dict[str, Any]) -> "Settings":
    """What the front needs: where it listens, what it takes, and the names that the model's process
    told.
    """
    from llmcli.serve.settings import Settings

    return Settings(**{**wish.settings, "names": tuple(facts["names"])})
