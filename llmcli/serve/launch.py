"""Opens the model of a server and starts its engine thread: ServeRequest -> EngineBridge."""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.api.server_settings import ServerSettings
    from llmcli.config import Config
    from llmcli.model_loader.open_server_model import ServerModel
    from llmcli.serve.engine_thread.bridge import EngineBridge
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """The request to serve a model, as a value that can be sent to another process.

    `settings`: the fields of ServerSettings; `stream_interval_seconds`: time between two updates of
    a stream; `is_private`: whether clients share no cached prefixes.
    """

    ref: str
    run_flags: RunFlags
    config: "Config"
    ui: "UI"
    parallel: int
    max_waiting: int
    settings: dict[str, Any]
    pooling: str | None = None
    stream_interval_seconds: float = 0.0
    is_private: bool = False


@contextmanager
def open_service(request: ServeRequest) -> "Iterator[tuple[EngineBridge, ServerSettings]]":
    """Open the model and start its engine thread. Yield the engine bridge and the server's
    settings.

    Raises UserError.
    """
    from llmcli.model_loader import open_server_model
    from llmcli.serve.engine_thread.bridge import EngineBridge

    args = request.ref, request.run_flags, request.config, request.ui, request.parallel
    with open_server_model.open_server_model(
        *args, on_other_thread=True, is_private=request.is_private
    ) as hosted:
        if request.pooling:
            hosted.runner.pooling = request.pooling
            hosted.runner.embedder()  # fails now if the model cannot compute embeddings
        with closing(
            EngineBridge(
                hosted.runner,
                request.parallel,
                request.max_waiting,
                request.stream_interval_seconds,
            )
        ) as bridge:
            yield bridge, _build_settings(hosted, request.run_flags, **request.settings)


def _build_settings(
    hosted: "ServerModel", run_flags: RunFlags, names: tuple[str, ...], **more: Any
) -> "ServerSettings":
    from llmcli.api.server_settings import ServerSettings

    runner = hosted.runner
    predict = None if run_flags.predict in (None, -1) else run_flags.predict
    context_limit = min(runner.n_ctx, runner.header.context_length or runner.n_ctx)
    return ServerSettings(
        names or (hosted.name,),
        int(time.time()),
        hosted.sampling,
        hosted.system,
        run_flags.stops,
        predict,
        max_context=context_limit if run_flags.options.ctx_size is None else runner.n_ctx,
        **more,
    )


def print_ready(settings: "ServerSettings", n_ctx: int, parallel: int, ui: "UI") -> None:
    """Print that the server is ready, and its address."""
    from llmcli.serve import server

    url = server.server_url(settings)
    if ui.json:
        document = {"url": url, "host": settings.host, "port": settings.port, "pid": os.getpid()}
        document |= {} if settings.grpc_port is None else {"grpc_port": settings.grpc_port}
        ui.result({**document, "model": settings.model_name, "parallel": parallel, "n_ctx": n_ctx})
    else:
        grpc_note = "" if settings.grpc_port is None else f", gRPC on port {settings.grpc_port}"
        ui.note(
            f"{settings.model_name} is served at {url}/v1{grpc_note} · {parallel} answers at once · "
            "Ctrl-C stops"
        )
