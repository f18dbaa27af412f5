"""`llmcli serve`: serves one model or several over HTTP with OpenAI's API until it is stopped."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli import text_input
from llmcli.commands.command_line import panels
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options import endpoints, run
from llmcli.commands.options.arguments import DEFAULT_MODEL, REF_HELP
from llmcli.commands.options.pooling import Pooling, check_pooling
from llmcli.commands.options.run import choose_model
from llmcli.errors import UsageError, UserError
from llmcli.loopback import LOOPBACK_HOSTS
from llmcli.model_loader.open_server_model import DEFAULT_PARALLEL, REFUSED_FIELDS
from llmcli.model_loader.run_flags import RunFlags
from llmcli.serve.launch import open_service, print_ready
from llmcli.serve.serve_request import ServeRequest

if TYPE_CHECKING:
    from llmcli.config import Config

MIN_KEY_CHARACTERS = 8  # characters of an API key
MAX_PARALLEL, MAX_WAITING = 128, 100_000
STREAM_INTERVAL_MS = 33.0  # milliseconds: about thirty updates per second
DEFAULT_KEEP_ALIVE = "5m"  # as in ollama
DEFAULT_PREFIX_SIZE = "8G"  # of all states in --cache-dir together
DEFAULT_FILES_SIZE = "4G"  # of all files of clients together
MAX_BODY_BYTES = 8 << 20  # bytes; a context of 100,000 tokens is half a megabyte of text

Addresses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on; repeatable, or several with commas. Beyond this machine a key "
        "is required. [127.0.0.1]",
        rich_help_panel=panels.NETWORK,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, help="Port; 0 chooses a free one.", rich_help_panel=panels.NETWORK
    ),
]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Also serve gRPC on this port (pip install 'llmcli[grpc]').",
        rich_help_panel=panels.NETWORK,
    ),
]
Parallel = Annotated[
    int,
    typer.Option(
        "-np",
        "--parallel",
        min=1,
        max=MAX_PARALLEL,
        help="Answers at once.",
        rich_help_panel=panels.REQUESTS,
    ),
]
Waiting = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_WAITING,
        help="Requests that may wait; further ones are refused (429).",
        rich_help_panel=panels.REQUESTS,
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "-a", "--alias", help="Model name in the API; repeatable.", rich_help_panel=panels.NETWORK
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="API key that requests must carry; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="File of API keys, one per line; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]
Priorities = Annotated[
    bool,
    typer.Option(
        "--priorities/--no-priorities",
        help="Let requests raise their own priority above that of others.",
        rich_help_panel=panels.REQUESTS,
    ),
]
PriorityKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="API key whose requests may raise their priority; repeatable.",
        rich_help_panel=panels.REQUESTS,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TLS: the private key, PEM.", rich_help_panel=panels.NETWORK),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TLS: the certificate, PEM.", rich_help_panel=panels.NETWORK),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Allow web pages of this origin, * for any; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Another Host name to accept besides localhost, * for any; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]
Body = Annotated[
    int,
    typer.Option(
        min=1024,
        metavar="BYTES",
        help="Maximum size of a request's body.",
        rich_help_panel=panels.REQUESTS,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Maximum number of tokens of any answer.", rich_help_panel=panels.REQUESTS
    ),
]
Drain = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Time for answers to finish when it stops.",
        rich_help_panel=panels.REQUESTS,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="With several models: the most memory of all together, such as 8G. [what is free]",
        rich_help_panel=panels.REQUESTS,
    ),
]
KeepAlive = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="With several models: how long an idle one stays loaded, such as 30s, 5m or -1 for "
        "ever; 0: not at all. [5m]",
        rich_help_panel=panels.REQUESTS,
    ),
]
Replicas = Annotated[
    int, typer.Option(min=0, max=256, metavar="N", help="Number of model replicas (Ray Serve).")
]
Ray = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Ray cluster of the replicas: auto, or HOST:PORT."),
]
WhileStdin = Annotated[
    bool,
    typer.Option("--while-stdin", help="Stop when standard input closes (the parent exits)."),
]
StreamEvery = Annotated[
    float,
    typer.Option(
        min=0,
        max=1000,
        metavar="MS",
        help="Send tokens that arrive within this time together; 0: send each token alone.",
        rich_help_panel=panels.REQUESTS,
    ),
]
Private = Annotated[
    bool,
    typer.Option(
        "--private",
        help="Clients (by key, else address) share no cache: response times reveal nothing.",
        rich_help_panel=panels.REQUESTS,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="When ready, print one JSON document with the address.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("serve", cls=run.run_command_without(REFUSED_FIELDS))(serve)


def serve(
    ctx: typer.Context,
    refs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REF",
            autocompletion=complete_models,
            help=f"{REF_HELP} Several REFs: each is loaded on request. None: all models on this disk.",
        ),
    ] = None,
    host: Addresses = None,
    port: Port = 8080,
    grpc_port: GrpcPort = None,
    parallel: Parallel = DEFAULT_PARALLEL,
    max_waiting: Waiting = 64,
    alias: Alias = None,
    api_key: Keys = None,
    api_key_file: KeyFiles = None,
    priorities: Priorities = False,
    priority_key: PriorityKeys = None,
    ssl_key_file: TlsKey = None,
    ssl_cert_file: TlsCert = None,
    cors: Cors = None,
    allow_host: AllowHost = None,
    max_body: Body = MAX_BODY_BYTES,
    max_tokens: MaxTokens = None,
    pooling: Pooling = None,
    metrics: endpoints.Metrics = True,
    slots: endpoints.Slots = True,
    ui: endpoints.Page = True,
    drop_nonces: endpoints.DropNonces = True,
    slot_save_path: endpoints.SlotSavePath = None,
    files_folder: endpoints.FilesFolder = None,
    max_files_size: endpoints.MaxFilesSize = None,
    cache_dir: endpoints.PrefixFolder = None,
    cache_dir_size: endpoints.PrefixFolderSize = None,
    context_shift: endpoints.ContextShift = False,
    kv_unified_per_slot: endpoints.ContextPerSlot = None,
    verbose: endpoints.Verbose = False,
    drain: Drain = 30,
    stream_every: StreamEvery = STREAM_INTERVAL_MS,
    private: Private = False,
    memory_limit: MemoryLimit = None,
    keep_alive: KeepAlive = None,
    replicas: Replicas = 0,
    ray: Ray = None,
    while_stdin: WhileStdin = False,
    json: Json = False,
) -> None:
    """Answer many requests at once over HTTP, with OpenAI's API."""
    from llmcli.model_loader import open_server_model
    from llmcli.serve import launch_processes, server
    from llmcli.serve.http import origin_guard
    from llmcli.serve.processes import parent_watch

    run_flags = run.parse_run_flags(ctx)
    names = tuple(refs or ())
    serves_several = len(names) > 1 or (not names and run_flags.model is None)
    ref = "" if serves_several else _require_model(names[0] if names else None, run_flags)
    limit_bytes, keep_alive_seconds = _read_pool_options(memory_limit, keep_alive, serves_several)
    open_server_model.refuse_personal_flags(run_flags)
    hosts = _split_hosts(host or [])
    keys = _read_keys([*(api_key or []), *(priority_key or [])], api_key_file or [], hosts)
    server.check_tls(ssl_key_file, ssl_cert_file)
    origins, host_names = (
        tuple(map(origin_guard.parse_origin, cors or ())),
        tuple(map(origin_guard.parse_host, allow_host or ())),
    )
    check_pooling(pooling)
    if grpc_port is not None:
        _check_grpc(in_other_process=bool(run_flags.placement.rpc or replicas or ray))
    disabled = [
        (path, option)
        for path, option, is_on in (
            ("/metrics", "--metrics", metrics),
            ("/slots", "--slots", slots),
            ("/", "--ui", ui),
        )
        if not is_on
    ]
    if slot_save_path is not None and (replicas or ray):
        raise UsageError(
            "--slot-save-path needs a single model, because each replica has its own slots",
            hint="leave out --replicas and --ray",
        )
    if slot_save_path is not None and not slot_save_path.is_dir():
        raise UserError(
            f"--slot-save-path {slot_save_path} is no folder", hint=f"mkdir -p '{slot_save_path}'"
        )
    if serves_several:
        _refuse_single_options(
            run_flags,
            {
                "--alias": alias,
                "--grpc-port": grpc_port,
                "--slot-save-path": slot_save_path,
                "--files-folder": files_folder,
                "--replicas": replicas,
                "--ray": ray,
                "--rpc": run_flags.placement.rpc,
                "--model": run_flags.model,
                "--quant": run_flags.quant,
                "--chat-template": run_flags.chat_template,
            },
        )
    max_files_bytes = _read_files_size(files_folder, max_files_size, bool(replicas or ray))
    max_prefix_bytes = _read_prefix_size(cache_dir, cache_dir_size)
    config, terminal = start_command(json, run_flags.offline)
    if while_stdin:
        parent_watch.exit_with_parent(0)
    with server.open_listeners(hosts, port) as listeners:
        request = ServeRequest(
            ref,
            run_flags,
            config,
            terminal,
            parallel,
            max_waiting,
            {
                "names": tuple(alias or ()),
                "max_answer_tokens": max_tokens,
                "keys": keys,
                "allows_priorities": priorities,
                "priority_keys": tuple(priority_key or ()),
                "cors": origins,
                "allow_hosts": host_names,
                "max_body": max_body,
                "drain": drain,
                "host": hosts[0],
                "further_hosts": hosts[1:],
                "port": listeners[0].getsockname()[1],
                "disabled_paths": tuple(disabled),
                "keeps_nonces": not drop_nonces,
                "slot_folder": slot_save_path,
                "files_folder": files_folder,
                "max_files_bytes": max_files_bytes,
                "slides_context": context_shift,
                "shows_prompts": verbose,
                "grpc_port": grpc_port,
                "ssl_key": ssl_key_file,
                "ssl_cert": ssl_cert_file,
            },
            pooling,
            stream_every / 1e3,
            private,
            kv_unified_per_slot,
            _find_prefix_folder(cache_dir, config),
            max_prefix_bytes,
        )
        if serves_several:
            stopped = launch_processes.run_models(
                request, names, limit_bytes, keep_alive_seconds, listeners
            )
        elif replicas or ray:
            stopped = launch_processes.run_replicas(request, replicas or 1, ray, listeners)
        elif run_flags.placement.rpc:
            stopped = launch_processes.run_child(request, listeners)
        else:
            with open_service(request) as (bridge, settings):
                n_ctx = bridge.runner.n_ctx
                ready = partial(print_ready, settings, n_ctx, parallel, terminal)
                stopped = server.run_server(bridge, settings, listeners, ready)
    if stopped == "SIGINT":
        raise typer.Exit(130)


def _read_pool_options(
    limit: str | None, keep_alive: str | None, serves_several: bool
) -> tuple[int | None, float]:
    """Return the bytes of --memory-limit and the seconds of --keep-alive. Raises UsageError or
    UserError if one is wrong, or has no meaning for a single model.
    """
    from llmcli.units import parse_duration
    from quant.quantize.shards import parse_size

    for flag, value in (("--memory-limit", limit), ("--keep-alive", keep_alive)):
        if value is not None and not serves_several:
            raise UsageError(
                f"{flag} applies only to several models",
                hint="give no REF or several, or leave it out",
            )
    limit_bytes = None if limit is None else parse_size(limit, "--memory-limit", "memory")
    try:
        seconds = parse_duration(keep_alive or DEFAULT_KEEP_ALIVE)
    except ValueError as error:
        raise UsageError(f"--keep-alive: {error}", hint="--keep-alive 10m") from None
    return limit_bytes, seconds


def _refuse_single_options(run_flags: RunFlags, options: dict[str, object]) -> None:
    """Raise UsageError if one of these options is set, which belong to a single model."""
    for flag, value in options.items():
        if value:
            raise UsageError(
                f"{flag} belongs to a server of a single model",
                hint=f"llmcli serve {DEFAULT_MODEL} {flag} …, or set it for each model in models.toml",
            )


def _require_model(ref: str | None, run_flags: RunFlags) -> str:
    if (model_ref := choose_model(ref, run_flags.model)) is None:
        raise UsageError("no model given", hint=f"llmcli serve {DEFAULT_MODEL}")
    return model_ref


def _check_grpc(in_other_process: bool) -> None:
    from llmcli.serve.grpc import service

    if in_other_process:
        raise UserError(
            "--grpc-port needs the model in this process, but it runs in another",
            hint="leave out --rpc, --replicas and --ray, or use HTTP",
        )
    service.require_grpc()


def _read_files_size(folder: Path | None, max_size: str | None, has_replicas: bool) -> int:
    """Return the bytes of --max-files-size. Raises UsageError or UserError if it is wrong, or if the
    folder of --files-folder cannot be used.
    """
    from llmcli.serve.batches.file_store import require_folder
    from quant.quantize.shards import parse_size

    n_bytes = parse_size(max_size or DEFAULT_FILES_SIZE, "--max-files-size", "all files")
    if folder is None and max_size is not None:
        raise UsageError(
            "--max-files-size applies only to --files-folder", hint="add --files-folder FOLDER"
        )
    if folder is not None and has_replicas:
        raise UsageError(
            "--files-folder needs a single model, because only one process can use the folder",
            hint="leave out --replicas and --ray",
        )
    if folder is not None:
        require_folder(folder)
    return n_bytes


def _read_prefix_size(folder: str | None, max_size: str | None) -> int:
    """Return the bytes of --cache-dir-size. Raises UsageError if it is wrong."""
    from quant.quantize.shards import parse_size

    if folder is None and max_size is not None:
        raise UsageError(
            "--cache-dir-size applies only to --cache-dir", hint="add --cache-dir FOLDER"
        )
    return parse_size(max_size or DEFAULT_PREFIX_SIZE, "--cache-dir-size", "all states")


def _find_prefix_folder(typed: str | None, config: "Config") -> Path | None:
    """Return the folder of --cache-dir, or None. Raises UserError if there is something else."""
    from llmcli.catalog.prefix_folders import default_folder

    if typed is None:
        return None
    folder = default_folder(config) if typed == "auto" else Path(typed).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--cache-dir {folder} is no folder", hint="name another one, or auto")
    return folder


def _split_hosts(typed: list[str]) -> tuple[str, ...]:
    """Return the addresses of --host, each once; by default that of this machine."""
    hosts = [host.strip() for text in typed for host in text.split(",")]
    return tuple(dict.fromkeys(host for host in hosts if host)) or (LOOPBACK_HOSTS[0],)


def _read_keys(typed: list[str], files: list[Path], hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the API keys of the command line and of the key files.

    Empty lines and # comments of a key file are skipped. Raises UserError for an invalid key, or if
    one of `hosts` is reachable from other machines and there is no key.
    """
    lines = [line.strip() for file in files for line in text_input.read_text(file).splitlines()]
    keys = [*typed, *(line for line in lines if line and not line.startswith("#"))]
    if files and not keys:
        raise UserError(f"there is no key in {files[0]}", hint="write one key per line")
    for key in keys:
        if len(key) < MIN_KEY_CHARACTERS or not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(
                "an API key is too short, or contains characters that HTTP headers do not allow",
                hint=f"use {MIN_KEY_CHARACTERS} or more ASCII characters without spaces, "
                "such as the output of: openssl rand -hex 16",
            )
    public_hosts = [host for host in hosts if host not in LOOPBACK_HOSTS]
    if public_hosts and not keys:
        raise UserError(
            f"{public_hosts[0]} can be reached from other machines, and no API key is set",
            hint="add --api-key KEY (or --api-key-file FILE), or leave out --host",
        )
    return tuple(keys)
