"""The server around the application: its socket, TLS, signals, and shutdown.

After the first SIGTERM or Ctrl-C, running answers have the drain time to finish. A second signal
ends them at once.
"""

import asyncio
import resource
import signal
import socket as sockets
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from llmcli.api.server_settings import ServerSettings
from llmcli.errors import UsageError, UserError
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.grpc import service
from llmcli.serve.grpc.answers import EngineAnswers, FrontAnswers, GrpcAnswers
from llmcli.serve.http.app import make_app
from llmcli.serve.http.http_connection import HttpConnection
from llmcli.serve.http.service import Service
from llmcli.serve.http.websocket_connection import WebSocketConnection
from llmcli.serve.processes.front import FrontServer

BACKLOG_CONNECTIONS = 2048
MAX_OPEN_FILES = 1 << 16  # shells usually allow a process only 1,024 files
SWITCH_INTERVAL_SECONDS = 0.0005  # time after which a Python thread must let another one run
# An idle connection stays open for this time. Most clients close theirs earlier, so that they do
# not send a request on a connection that the server is closing.
KEEP_ALIVE_SECONDS = 75


class HttpServer(uvicorn.Server):
    """uvicorn's server with llmcli's shutdown, and with a gRPC server beside it if the settings
    have a `grpc_port`. `bridge`: an EngineBridge, or a FrontServer if the model runs in other
    processes. `on_ready`: called once the server listens. `stop_signal`: the name of the signal
    that stopped the server, or "".
    """

    def __init__(
        self,
        bridge: EngineBridge | FrontServer,
        settings: ServerSettings,
        on_ready: Callable[[], None],
    ) -> None:
        tls = (
            {"ssl_keyfile": settings.ssl_key, "ssl_certfile": settings.ssl_cert}
            if settings.ssl_cert
            else {}
        )
        if isinstance(bridge, EngineBridge):
            app: Any = make_app(bridge, settings)
            owner: Service | FrontServer = app.state.service
            bridge.on_engine_death = self.end_after_engine_death
        else:
            app = owner = bridge
        websocket_class: Any = partial(WebSocketConnection, owner.body_budget)
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=HttpConnection,
                ws=websocket_class,
                ws_per_message_deflate=False,
                lifespan="off",
                ws_max_size=settings.max_body,
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(settings.drain) + 5,
                **tls,  # type: ignore[arg-type]
            )
        )
        self.bridge, self.settings, self.on_ready, self.stop_signal = bridge, settings, on_ready, ""
        self.grpc_port = settings.grpc_port
        self._service = owner if isinstance(owner, Service) else None
        self._socket_answers = owner.socket_answers
        self._grpc: Any = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the stop signals while the server runs. Unlike uvicorn's method, this one does not
        raise them again afterwards, because the caller of run_server() acts on the returned name.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully at the first signal, and at once at the second."""
        if self.should_exit:
            self.force_exit = True
            self.bridge.stop()
        self.should_exit = True
        self.stop_signal = self.stop_signal or signal.Signals(sig).name

    def end_after_engine_death(self) -> None:
        """Shut down because the engine's thread has died. Called on that thread."""
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        """Start to listen, for HTTP and for gRPC, and call `on_ready`."""
        await super().startup(sockets)
        if self._service is not None:
            await self._service.batches.start()
        if self.grpc_port is not None:
            answers: GrpcAnswers
            if isinstance(self.bridge, FrontServer):
                answers = FrontAnswers(self.bridge)
            else:
                assert self._service is not None
                answers = EngineAnswers(self._service)
            self._grpc, self.grpc_port = await service.start_server(answers)
        self.on_ready()

    async def shutdown(self, sockets: Any = None) -> None:
        """Accept no more connections, wait for the running answers, and close all connections. The
        lines of batches are not waited for.
        """
        for server in self.servers:
            server.close()
        if self._service is not None:
            await self._service.batches.stop()
        draining = asyncio.ensure_future(self.bridge.drain(self.settings.drain))
        calls = asyncio.ensure_future(self._grpc.stop(self.settings.drain)) if self._grpc else None
        await self._finish_sockets()
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        else:
            await draining
        if calls:  # the bridge has ended their answers; wait until the calls end, too
            await (self._grpc.stop(0) if self.force_exit else calls)
        if self._service is not None:
            self._service.batches.close()

    async def _finish_sockets(self) -> None:
        """Wait at most the drain time until the running answers of WebSockets are sent. Afterwards,
        uvicorn closes the sockets at once.
        """
        deadline = time.monotonic() + self.settings.drain + 1
        while self._socket_answers and not self.force_exit and time.monotonic() < deadline:
            await asyncio.wait(set(self._socket_answers), timeout=0.1)


def run_server(
    bridge: EngineBridge | FrontServer,
    settings: ServerSettings,
    listeners: Sequence[sockets.socket],
    on_ready: Callable[[], None],
) -> str:
    """Serve until a signal arrives, and return the name of the signal. `listeners`: the sockets on
    which it listens. Raises the error that ended the engine's thread, if there was one.
    """
    server = make_server(bridge, settings, on_ready)
    server.run(list(listeners))
    return server.stop_signal


def make_server(
    bridge: EngineBridge | FrontServer, settings: ServerSettings, on_ready: Callable[[], None]
) -> HttpServer:
    """Return a server, after setting this process's limits for one."""
    # Python's default interval is 5 ms. The engine's thread must not wait that long after each pass
    # for a thread that renders a template.
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _raise_file_limit()
    return HttpServer(bridge, settings, on_ready)


def _raise_file_limit() -> None:
    """Raise this process's limit of open files as far as the system allows, because each connection
    is an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    with suppress(ValueError, OSError):  # macOS has a lower limit that it does not report
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


@contextmanager
def open_listener(host: str, port: int, *, is_only: bool = True) -> Iterator[sockets.socket]:
    """Open a listening socket for the `with` block. It is opened before the model is loaded, so
    that clients can already connect. `is_only`: no other address is listened on. Raises UserError
    if the address is in use.
    """
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    # The protocol must be set: asyncio sets TCP_NODELAY only for sockets with this protocol, and
    # sockets of socket.create_server do not have it. Without TCP_NODELAY, every answer and chunk
    # waits for the client's delayed acknowledgement.
    with sockets.socket(family, sockets.SOCK_STREAM, sockets.IPPROTO_TCP) as listener:
        try:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            # :: alone also accepts IPv4; beside 0.0.0.0 it must not
            if family == sockets.AF_INET6 and not is_only:
                listener.setsockopt(sockets.IPPROTO_IPV6, sockets.IPV6_V6ONLY, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG_CONNECTIONS)
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise UserError(
                message, hint="choose another --port (0: a free one), or another --host"
            ) from None
        yield listener


@contextmanager
def open_listeners(hosts: Sequence[str], port: int) -> Iterator[list[sockets.socket]]:
    """Open a listening socket on each address for the `with` block, all with the same port. With
    port 0, the first address chooses it. Raises UserError if an address is in use.
    """
    with ExitStack() as stack:
        listeners: list[sockets.socket] = []
        for host in hosts:
            actual_port = listeners[0].getsockname()[1] if listeners else port
            listener = open_listener(host, actual_port, is_only=len(hosts) == 1)
            listeners.append(stack.enter_context(listener))
        yield listeners


def check_tls(key: Path | None, cert: Path | None) -> None:
    """Raise UserError if the files are not a TLS key and its certificate. Called before a model is
    loaded, because loading can take minutes.
    """
    if key is None and cert is None:
        return
    if key is None or cert is None:
        raise UsageError(
            "TLS needs a key and a certificate", hint="give both --ssl-key-file and --ssl-cert-file"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            cert, key, partial(_refuse_password, key)
        )
    except OSError as error:  # SSLError is an OSError
        raise UserError(
            f"{cert} and {key} cannot be used for TLS: {error.strerror or error}",
            hint="both must be PEM files",
        ) from None


def _refuse_password(key: Path) -> str:
    """Raise UserError for a key file with a password. Otherwise OpenSSL would ask for the password
    on the terminal, now and again when the server starts.
    """
    hint = f"make one without a password: openssl pkey -in {key} -out open.pem (chmod 600)"
    raise UserError(f"{key} is protected by a password", hint=hint)


def server_url(settings: ServerSettings, host: str | None = None) -> str:
    """Return the URL of the server, such as http://127.0.0.1:8080. `host`: one of its addresses; by
    default the first.
    """
    name = host or settings.host
    name = f"[{name}]" if ":" in name else name
    return f"{'https' if settings.ssl_cert else 'http'}://{name}:{settings.port}"
