"""The HTTP server around the application: its socket, TLS, signals, and how it ends.

The first SIGTERM or Ctrl-C lets what is being answered end, within the drain time; a second one
ends it at once.
"""

import asyncio
import resource
import signal
import socket as sockets
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from llmcli.errors import UsageError, UserError
from llmcli.serve import procedures
from llmcli.serve.app import make_app
from llmcli.serve.bridge import Bridge
from llmcli.serve.connection import Connection
from llmcli.serve.front import Front
from llmcli.serve.settings import Settings
from llmcli.serve.wire import Wire

BACKLOG = 2048
MOST_FILES = 1 << 16  # connections are files, and shells give a process 1,024
SWITCH = 0.0005  # seconds that a thread of Python may keep another waiting
KEEP_ALIVE = 75  # seconds that an idle connection stays open, longer than most clients keep theirs


class Server(uvicorn.Server):
    """uvicorn, with our way to stop; `stopped` is the name of the signal that did."""

    def __init__(
        self, bridge: Bridge | Front, settings: Settings, ready: Callable[[], None]
    ) -> None:
        tls = (
            {"ssl_keyfile": settings.ssl_key, "ssl_certfile": settings.ssl_cert}
            if settings.ssl_cert
            else {}
        )
        app: Any = make_app(bridge, settings) if isinstance(bridge, Bridge) else bridge
        wire: Any = partial(
            Wire, app.state.service.room if isinstance(bridge, Bridge) else bridge.room
        )
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=Connection,
                ws=wire,
                ws_per_message_deflate=False,
                lifespan="off",
                ws_max_size=settings.max_body,
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=int(settings.drain) + 5,
                **tls,  # type: ignore[arg-type]
            )
        )
        self.bridge, self.settings, self.ready, self.stopped = bridge, settings, ready, ""
        self.grpc_port = settings.grpc_port
        self._service = app.state.service if isinstance(bridge, Bridge) else None
        self._talks = app.state.service.talks if isinstance(bridge, Bridge) else bridge.talks
        self._grpc: Any = None
        if isinstance(bridge, Bridge):
            bridge.died = self.end

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours for as long as it runs; nothing is raised again afterwards: that is the caller's."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop softly the first time, at once the second."""
        if self.should_exit:
            self.force_exit = True
            self.bridge.stop()
        self.should_exit = True
        self.stopped = self.stopped or signal.Signals(sig).name

    def end(self) -> None:
        """Take no more and leave: the engine has died. Whoever started the server sees it, and may
        start another.
        """
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then tell."""
        await super().startup(sockets)
        if self.grpc_port is not None:
            assert self._service is not None, "the model is in another process"
            self._grpc, self.grpc_port = await procedures.start(self._service)
        self.ready()

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no more, let what there is end, close."""
        for server in self.servers:
            server.close()
        draining = asyncio.ensure_future(self.bridge.drain(self.settings.drain))
        calls = asyncio.ensure_future(self._grpc.stop(self.settings.drain)) if self._grpc else None
        await self._said()
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        else:
            await draining
        if calls:  # what the bridge has ended has an end here, too
            await (self._grpc.stop(0) if self.force_exit else calls)

    async def _said(self) -> None:
        """Until what is under way on WebSockets has been told, which uvicorn would close at once."""
        until = time.monotonic() + self.settings.drain + 1
        while self._talks and not self.force_exit and time.monotonic() < until:
            await asyncio.wait(set(self._talks), timeout=0.1)


def run(
    bridge: Bridge | Front, settings: Settings, socket: sockets.socket, ready: Callable[[], None]
) -> str:
    """Serve until a signal comes; its name. Raises what the engine's thread died of."""
    server = Server(bridge, settings, ready)
    # The engine's thread takes up its work behind each pass, and must not wait 5 ms for one that
    # renders a template.
    sys.setswitchinterval(SWITCH)
    _open_more()
    server.run([socket])
    return server.stopped


def _open_more() -> None:
    """As many connections as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    with suppress(ValueError, OSError):  # macOS has a smaller limit that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@contextmanager
def bound(host: str, port: int) -> Iterator[sockets.socket]:
    """A socket that listens: whoever comes while the model is loaded waits. Raises UserError where
    it is taken.
    """
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    # TCP by name: asyncio lets small pieces go at once (TCP_NODELAY) only where the socket says
    # that it is TCP, which socket.create_server's does not. Every answer and chunk waited for the
    # client's delayed acknowledgement: /health took 42 ms, now 0.25 (two cores, 2026-11).
    with sockets.socket(family, sockets.SOCK_STREAM, sockets.IPPROTO_TCP) as made:
        try:
            made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(BACKLOG)
        except OSError as error:
            what = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise UserError(
                what, hint="take another --port (0: a free one), or another --host"
            ) from None
        yield made


def check_tls(key: Path | None, cert: Path | None) -> None:
    """Raise UserError for files that make no TLS, before a model is loaded."""
    if key is None and cert is None:
        return
    if key is None or cert is None:
        raise UsageError(
            "TLS takes a key and a certificate", hint="give both --ssl-key-file and --ssl-cert-file"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, partial(_locked, key))
    except OSError as error:  # SSLError is one
        raise UserError(
            f"{cert} and {key} make no TLS: {error.strerror or error}", hint="both are PEM files"
        ) from None


def _locked(key: Path) -> str:
    """OpenSSL wants a password: it would ask the terminal for it now, and again when the server
    begins.
    """
    hint = f"make one that is not: openssl pkey -in {key} -out open.pem (chmod 600)"
    raise UserError(f"{key} is locked with a password", hint=hint)


def address(settings: Settings) -> str:
    """Where the server is found."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.ssl_cert else 'http'}://{host}:{settings.port}"
