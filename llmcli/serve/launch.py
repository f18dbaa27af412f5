"""ServeRequest; opens the model and its bridge."""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.model_loader.run_flags import Flags

if TYPE_CHECKING:
    from llmcli.api.server_settings import Settings
    from llmcli.config import Config
    from llmcli.serve.engine_thread.bridge import Bridge
    from llmcli.ui import UI


def _build_settings(
    hosted: "Hosted", given: Flags, names: tuple[str, ...], **more: Any
) -> "Settings":
    from llmcli.api.server_settings import Settings

    runner = hosted.runner
    predict = None if given.predict in (None, -1) else given.predict
    context_limit = min(runner.n_ctx, runner.header.context_length or runner.n_ctx)
    return Settings(
        names or (hosted.name,),
        int(time.time()),
        hosted.sampling,
        hosted.system,
        given.stops,
        predict,
        most_context=context_limit if given.options.ctx_size is None else runner.n_ctx,
        **more,
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """What to serve, as one value that can be sent to another process.

    `settings`: fields of the server's settings; `stream_interval_seconds`: seconds between two
    updates of a stream; `is_private`: clients share no cached prefixes.
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
def opened(request: Wish) -> "Iterator[tuple[Bridge, Settings]]":
    """Open the model with its engine thread; yield the bridge and the server's settings.

    Raises UserError.
    """
    from llmcli.model_loader import open_server_model
    from llmcli.serve.engine_thread.bridge import Bridge

    args = request.ref, request.given, request.config, request.ui, request.parallel
    with open_server_model.host(*args, apart=True, private=request.private) as hosted:
        if request.pooling:
            hosted.runner.pooling = request.pooling
            hosted.runner.embedder()  # fail now if the model cannot make embeddings
        with closing(
            Bridge(hosted.runner, request.parallel, request.waiting, request.every)
        ) as bridge:
            yield bridge, _build_settings(hosted, request.given, **request.settings)


def tell(settings: "Settings", n_ctx: int, parallel: int, ui: "UI") -> None:
    """Print that the server is ready, and its address."""
    from llmcli.serve import server

    url = server.address(settings)
    if ui.json:
        document = {"url": url, "host": settings.host, "port": settings.port, "pid": os.getpid()}
        document |= {} if settings.grpc_port is None else {"grpc_port": settings.grpc_port}
        ui.result({**document, "model": settings.name, "parallel": parallel, "n_ctx": n_ctx})
    else:
        grpc_note = "" if settings.grpc_port is None else f", gRPC on port {settings.grpc_port}"
        ui.note(
            f"{settings.name} is served at {url}/v1{grpc_note} · {parallel} answers at once · "
            "Ctrl-C stops"
        )


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.api.server_settings import Settings
    from llmcli.model_loader.open_server_model import Hosted
