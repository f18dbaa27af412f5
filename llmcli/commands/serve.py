"""`llmcli serve`: serves one model or several over HTTP with OpenAI's API until it is stopped."""

from functools import partial
from typing import Annotated

import typer

from llmcli.catalog.serve_table import MAX_PARALLEL
from llmcli.commands.command_line import panels
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options import endpoints, model_pool, network, run
from llmcli.commands.options.arguments import DEFAULT_MODEL, REF_HELP
from llmcli.commands.options.pooling import Pooling, check_pooling
from llmcli.commands.options.run import choose_model
from llmcli.errors import UsageError
from llmcli.model_loader.open_server_model import DEFAULT_PARALLEL, REFUSED_FIELDS
from llmcli.model_loader.run_flags import RunFlags
from llmcli.serve.launch import open_service, print_ready
from llmcli.serve.serve_request import ServeRequest

MAX_WAITING = 100_000
STREAM_INTERVAL_MS = 33.0  # milliseconds: about thirty updates per second
MAX_BODY_BYTES = 8 << 20  # bytes; a context of 100,000 tokens is half a megabyte of text

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
    host: network.Addresses = None,
    port: network.Port = 8080,
    grpc_port: network.GrpcPort = None,
    parallel: Parallel = DEFAULT_PARALLEL,
    max_waiting: Waiting = 64,
    alias: network.Alias = None,
    api_key: network.Keys = None,
    api_key_file: network.KeyFiles = None,
    priorities: Priorities = False,
    priority_key: PriorityKeys = None,
    ssl_key_file: network.TlsKey = None,
    ssl_cert_file: network.TlsCert = None,
    cors: network.Cors = None,
    allow_host: network.AllowHost = None,
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
    memory_limit: model_pool.MemoryLimit = None,
    keep_alive: model_pool.KeepAlive = None,
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
    limit_bytes, keep_alive_seconds = model_pool.read_pool_options(
        memory_limit, keep_alive, serves_several
    )
    open_server_model.refuse_personal_flags(run_flags)
    hosts = network.split_hosts(host or [])
    keys = network.read_keys([*(api_key or []), *(priority_key or [])], api_key_file or [], hosts)
    server.check_tls(ssl_key_file, ssl_cert_file)
    origins, host_names = (
        tuple(map(origin_guard.parse_origin, cors or ())),
        tuple(map(origin_guard.parse_host, allow_host or ())),
    )
    check_pooling(pooling)
    if grpc_port is not None:
        network.check_grpc(in_other_process=bool(run_flags.placement.rpc or replicas or ray))
    disabled = [
        (path, option)
        for path, option, is_on in (
            ("/metrics", "--metrics", metrics),
            ("/slots", "--slots", slots),
            ("/", "--ui", ui),
        )
        if not is_on
    ]
    endpoints.check_slot_folder(slot_save_path, bool(replicas or ray))
    if serves_several:
        model_pool.refuse_single_options(
            {
                "--alias": alias,
                "--slot-save-path": slot_save_path,
                "--replicas": replicas,
                "--ray": ray,
                "--rpc": run_flags.placement.rpc,
                "--model": run_flags.model,
                "--quant": run_flags.quant,
                "--chat-template": run_flags.chat_template,
            },
        )
    max_files_bytes = endpoints.read_files_size(files_folder, max_files_size, bool(replicas or ray))
    max_prefix_bytes = endpoints.read_prefix_size(cache_dir, cache_dir_size)
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
            endpoints.find_prefix_folder(cache_dir, config),
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


def _require_model(ref: str | None, run_flags: RunFlags) -> str:
    if (model_ref := choose_model(ref, run_flags.model)) is None:
        raise UsageError("no model given", hint=f"llmcli serve {DEFAULT_MODEL}")
    return model_ref
