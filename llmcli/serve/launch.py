"""Opens the model of a server, and starts the engine bridge that serves it."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.serve.serve_request import ServeRequest

if TYPE_CHECKING:
    from llmcli.api.server_settings import ServerSettings
    from llmcli.config import Config
    from llmcli.model_loader.earlier_load import EarlierLoad
    from llmcli.model_loader.open_server_model import ServerModel
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.runner import Runner
    from llmcli.serve.engine_thread.bridge import EngineBridge
    from llmcli.ui import UI


@contextmanager
def open_service(
    request: ServeRequest, earlier: "EarlierLoad | None" = None
) -> "Iterator[tuple[EngineBridge, ServerSettings]]":
    """Open the model and start its engine bridge for the `with` block. Yield the bridge and the
    server's settings. `earlier`: what predict_service() or an earlier load has found, if there was
    one. Raises UserError.
    """
    from llmcli.model_loader import open_server_model
    from llmcli.serve.engine_thread.bridge import EngineBridge

    with open_server_model.open_server_model(
        *_model_args(request),
        on_other_thread=True,
        is_private=request.is_private,
        earlier=earlier,
    ) as server_model:
        if request.pooling:
            server_model.runner.pooling = request.pooling
            server_model.runner.embedder()  # fails now if the model cannot compute embeddings
        with ExitStack() as stack:
            if request.prefix_folder is not None:
                stack.enter_context(_open_prefix_folder(server_model.runner, request))
            bridge = stack.enter_context(
                closing(
                    EngineBridge(
                        server_model.runner,
                        request.parallel,
                        request.max_waiting,
                        request.stream_interval_seconds,
                    )
                )
            )
            yield bridge, _build_settings(server_model, request, **request.settings)


def predict_service(request: ServeRequest) -> dict[str, Any]:
    """Return the memory that open_service() will take, as the fields of PlannedMemory. Raises
    UserError if no setting of the model fits.
    """
    from llmcli.model_loader.open_server_model import predict_server_memory

    return predict_server_memory(*_model_args(request)).as_dict()


def _model_args(request: ServeRequest) -> "tuple[str, RunFlags, Config, UI, int]":
    """Return the first arguments of open_server_model() and predict_server_memory()."""
    flags = request.run_flags
    options = replace(flags.options, saves_states=request.prefix_folder is not None)
    return (
        request.ref,
        replace(flags, options=options),
        request.config,
        request.ui,
        request.parallel,
    )


@contextmanager
def _open_prefix_folder(runner: "Runner", request: ServeRequest) -> Iterator[None]:
    """Open the prefix cache on disk for the `with` block."""
    from llmcli.catalog import prefix_folders
    from llmcli.runtime.open_disk_cache import open_disk_cache

    assert request.prefix_folder is not None
    prefix_folders.record_folder(request.prefix_folder, request.config)
    with open_disk_cache(
        runner, request.prefix_folder, request.prefix_folder_bytes, request.ui.note
    ):
        yield


def _build_settings(
    server_model: "ServerModel", request: ServeRequest, names: tuple[str, ...], **more: Any
) -> "ServerSettings":
    """Return the server's settings. `names`: the names for the model that the user chose; empty:
    the model's own name. `more`: further fields of ServerSettings.
    """
    from llmcli.api.server_settings import ServerSettings
    from llmcli.runtime.sinks_support import require_sinks_support

    runner, run_flags = server_model.runner, request.run_flags
    if more.get("slides_context"):
        require_sinks_support(runner)
    max_tokens = None if run_flags.predict in (None, -1) else run_flags.predict
    trained = runner.header.context_length or runner.n_ctx
    max_context = runner.n_ctx if run_flags.options.ctx_size else min(runner.n_ctx, trained)
    return ServerSettings(
        names or (server_model.name,),
        int(time.time()),
        server_model.sampling,
        server_model.system,
        run_flags.stops,
        max_tokens,
        allow_repetition=run_flags.endless,
        reasoning_budget=None if run_flags.reasoning_budget == -1 else run_flags.reasoning_budget,
        max_context=min(max_context, request.context_per_answer or max_context),
        **more,
    )


def print_ready(settings: "ServerSettings", n_ctx: int, parallel: int, ui: "UI") -> None:
    """Print that the server is ready, with its address; as a JSON object with `--json`."""
    from llmcli.serve import server

    url = server.server_url(settings)
    if ui.json:
        document = {"url": url, "host": settings.host, "port": settings.port, "pid": os.getpid()}
        if settings.further_hosts:
            document["urls"] = [server.server_url(settings, host) for host in settings.hosts]
        document |= {} if settings.grpc_port is None else {"grpc_port": settings.grpc_port}
        ui.result({**document, "model": settings.model_name, "parallel": parallel, "n_ctx": n_ctx})
    else:
        grpc_note = "" if settings.grpc_port is None else f", gRPC on port {settings.grpc_port}"
        ui.note(
            f"{settings.model_name} is served at {url}/v1{grpc_note} · {parallel} answers at once · "
            "Ctrl-C stops"
        )
