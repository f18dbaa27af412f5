"""`llmcli serve`: a model behind OpenAI's HTTP surface. Parse, open, serve until it is told to
stop.
"""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands import flags
from llmcli.commands.chat import DEFAULT, REF
from llmcli.commands.flags import Flags, RunCommand
from llmcli.commands.hosting import PARALLEL
from llmcli.commands.show import start
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.commands.hosting import Hosted
    from llmcli.config import Config
    from llmcli.serve.bridge import Bridge
    from llmcli.serve.settings import Settings
    from llmcli.ui import UI

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHORTEST = 8  # characters of a key
MOST_PARALLEL, MOST_WAITING = 128, 100_000
STREAM_EVERY = 33.0  # milliseconds: thirty pictures a second
MOST_BODY = 8 << 20  # a context of 100,000 tokens is half a megabyte of text

Address = Annotated[str, typer.Option(help="Address; beyond this machine only with a key.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="Also answer over gRPC on this port (pip install 'llmcli[grpc]')."
    ),
]
Parallel = Annotated[
    int, typer.Option("-np", "--parallel", min=1, max=MOST_PARALLEL, help="Answers at once.")
]
Waiting = Annotated[
    int, typer.Option(min=0, max=MOST_WAITING, help="Requests that may wait beside them; then 429.")
]
Alias = Annotated[
    list[str] | None,
    typer.Option("-a", "--alias", help="What requests call the model; may be repeated."),
]
Keys = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="Who asks must bring it; may be repeated.")
]
KeyFiles = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Keys, one a line; may be repeated.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="TLS: the private key, PEM.")]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="TLS: the certificate, PEM.")]
Cors = Annotated[
    list[str] | None,
    typer.Option(metavar="ORIGIN", help="Pages of this origin may ask, * any; may be repeated."),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="A name that the server goes by (Host), beside localhost; * any."
    ),
]
Body = Annotated[int, typer.Option(min=1024, metavar="BYTES", help="Of a request's body, at most.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="The most tokens of any answer.")]
Pooling = Annotated[
    str | None,
    typer.Option(
        metavar="mean|cls|last", help="How tokens become one embedding, else by the file."
    ),
]
Drain = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="For answers to end in when it stops.")
]
Replicas = Annotated[
    int, typer.Option(min=0, max=256, metavar="N", help="So many models side by side (Ray Serve).")
]
Ray = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="The replicas' cluster: auto, or HOST:PORT.")
]
WhileStdin = Annotated[
    bool, typer.Option("--while-stdin", help="Stop when standard input ends, as with its starter.")
]
StreamEvery = Annotated[
    float,
    typer.Option(
        min=0, max=1000, metavar="MS", help="Tokens that come sooner go together; 0: each alone."
    ),
]
Private = Annotated[
    bool,
    typer.Option(
        "--private",
        help="Clients (by key, else address) share no cells: times tell who asked alike.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="When ready, one JSON document with the address.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("serve", cls=RunCommand)(serve)


def serve(
    ctx: typer.Context,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help=REF)] = None,
    host: Address = "127.0.0.1",
    port: Port = 8080,
    grpc_port: GrpcPort = None,
    parallel: Parallel = PARALLEL,
    max_waiting: Waiting = 64,
    alias: Alias = None,
    api_key: Keys = None,
    api_key_file: KeyFiles = None,
    ssl_key_file: TlsKey = None,
    ssl_cert_file: TlsCert = None,
    cors: Cors = None,
    allow_host: AllowHost = None,
    max_body: Body = MOST_BODY,
    max_tokens: MaxTokens = None,
    pooling: Pooling = None,
    drain: Drain = 30,
    stream_every: StreamEvery = STREAM_EVERY,
    private: Private = False,
    replicas: Replicas = 0,
    ray: Ray = None,
    while_stdin: WhileStdin = False,
    json: Json = False,
) -> None:
    """Answer many at once over HTTP, as OpenAI's API does."""
    from llmcli.commands import apart, hosting
    from llmcli.serve import guard, server, tether

    given = flags.read(ctx)
    ref = _model(ref, given)
    hosting.check(given)
    keys = _keys(api_key or [], api_key_file or [], host)
    server.check_tls(ssl_key_file, ssl_cert_file)
    pages, hosts = tuple(map(guard.origin, cors or ())), tuple(map(guard.host, allow_host or ()))
    _check_pooling(pooling)
    if grpc_port is not None:
        _check_grpc(apart=bool(given.rpc or replicas or ray))
    config, ui = start(json, given.offline)
    if while_stdin:
        tether.tie(0)
    with server.bound(host, port) as socket:
        wish = Wish(
            ref,
            given,
            config,
            ui,
            parallel,
            max_waiting,
            {
                "names": tuple(alias or ()),
                "most_tokens": max_tokens,
                "keys": keys,
                "cors": pages,
                "allow_hosts": hosts,
                "max_body": max_body,
                "drain": drain,
                "host": host,
                "port": socket.getsockname()[1],
                "grpc_port": grpc_port,
                "ssl_key": ssl_key_file,
                "ssl_cert": ssl_cert_file,
            },
            pooling,
            stream_every / 1e3,
            private,
        )
        if replicas or ray:
            stopped = apart.run_replicas(wish, replicas or 1, ray, socket)
        elif given.rpc:
            stopped = apart.run(wish, socket)
        else:
            with opened(wish) as (bridge, settings):
                ready = partial(tell, settings, bridge.runner.n_ctx, parallel, ui)
                stopped = server.run(bridge, settings, socket, ready)
    if stopped == "SIGINT":
        raise typer.Exit(130)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be served, as one value that travels to another process; `settings` are those of
    the server alone, `every` is in seconds.
    """

    ref: str
    given: Flags
    config: "Config"
    ui: "UI"
    parallel: int
    waiting: int
    settings: dict[str, Any]
    pooling: str | None = None
    every: float = 0.0
    private: bool = False


@contextmanager
def opened(wish: Wish) -> "Iterator[tuple[Bridge, Settings]]":
    """The model, open, with its engine's thread."""
    from llmcli.commands import hosting
    from llmcli.serve.bridge import Bridge

    args = wish.ref, wish.given, wish.config, wish.ui, wish.parallel
    with hosting.host(*args, apart=True, private=wish.private) as hosted:
        if wish.pooling:
            hosted.runner.pooling = wish.pooling
            hosted.runner.embedder()  # or say now that it cannot be
        with closing(Bridge(hosted.runner, wish.parallel, wish.waiting, wish.every)) as bridge:
            yield bridge, _settings(hosted, wish.given, **wish.settings)


def tell(settings: "Settings", n_ctx: int, parallel: int, ui: "UI") -> None:
    """Say that it is ready, and where."""
    from llmcli.serve import server

    where = server.address(settings)
    if ui.json:
        about = {"url": where, "host": settings.host, "port": settings.port, "pid": os.getpid()}
        about |= {} if settings.grpc_port is None else {"grpc_port": settings.grpc_port}
        ui.result({**about, "model": settings.name, "parallel": parallel, "n_ctx": n_ctx})
    else:
        also = "" if settings.grpc_port is None else f", gRPC on port {settings.grpc_port}"
        ui.note(
            f"{settings.name} is served at {where}/v1{also} · {parallel} at once · Ctrl-C stops"
        )


def _settings(hosted: "Hosted", given: Flags, names: tuple[str, ...], **more: Any) -> "Settings":
    from llmcli.serve.settings import Settings

    runner = hosted.runner
    predict = None if given.predict in (None, -1) else given.predict
    most = min(runner.n_ctx, runner.header.context_length or runner.n_ctx)
    return Settings(
        names or (hosted.name,),
        int(time.time()),
        hosted.sampling,
        hosted.system,
        given.stops,
        predict,
        most_context=most if given.options.ctx_size is None else runner.n_ctx,
        **more,
    )


def _model(ref: str | None, given: Flags) -> str:
    if ref and given.model:
        raise UsageError(f"two models: {ref} and {given.model}", hint="leave one of them out")
    if (named := ref or given.model) is None:
        raise UsageError("no model given", hint=f"llmcli serve {DEFAULT}")
    return named


def _check_pooling(wanted: str | None) -> None:
    if wanted is None:
        return
    from llmcli.runtime.embedder import KINDS

    if wanted not in KINDS:
        more = {
            "none": "OpenAI's API has one vector a text",
            "rank": "a file that ranks says so itself",
        }
        hint = f"--pooling takes {', '.join(KINDS)}" + (
            f": {more[wanted]}" if wanted in more else ""
        )
        raise UsageError(f"--pooling is {wanted!r}", hint=hint)


def _check_grpc(apart: bool) -> None:
    from llmcli.serve import procedures

    if apart:
        raise UserError(
            "--grpc-port needs the model in this process, and it would be in another",
            hint="leave out --rpc, --replicas and --ray, or ask over HTTP",
        )
    procedures.check()


def _keys(typed: list[str], files: list[Path], host: str) -> tuple[str, ...]:
    """The keys of the command line and of files, where empty lines and those that begin with # are
    none. Raises UserError where there is none and others than this machine would not need one.
    """
    lines = [
        line.strip() for file in files for line in flags.text_file(file.expanduser()).splitlines()
    ]
    found = [*typed, *(line for line in lines if line and not line.startswith("#"))]
    if files and not found:
        raise UserError(f"there is no key in {files[0]}", hint="write one a line")
    for key in found:
        if len(key) < SHORTEST or not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(
                "an API key is too short, or has letters that no header takes",
                hint=f"take {SHORTEST} or more of ASCII without spaces: openssl rand -hex 16 makes one",
            )
    if host not in LOOPBACK and not found:
        raise UserError(
            f"{host} can be reached from other machines, and nobody would need a key",
            hint="add --api-key KEY (or --api-key-file FILE), or leave out --host",
        )
    return tuple(found)
