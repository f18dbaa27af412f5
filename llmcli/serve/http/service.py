"""Service: the objects that all routes share. Route: some paths and the function that handles their
requests. A new route is a new file in routes/.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies.base import RequestBody
from llmcli.api.server_settings import ServerSettings
from llmcli.serve.batches.worker import BatchWorker
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.embedding_queue import EmbeddingQueue
from llmcli.serve.http.body_budget import BodyBudget

MAX_UPLOADS = 16  # files that are uploaded at once


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that every handler of a route receives."""

    bridge: EngineBridge
    settings: ServerSettings
    embedding_queue: EmbeddingQueue
    body_budget: BodyBudget  # memory of large request bodies in all protocols
    batches: BatchWorker
    socket_answers: "set[asyncio.Task[None]]" = field(
        default_factory=set
    )  # running WebSocket answers
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS))
    routes: "Collection[Route]" = ()  # all routes, for /openapi.json and /docs


Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One or more paths and their handler.

    - `further_paths`: additional paths of the route.
    - `is_public`: requests need no API key.
    - `body_type`: the model of the request's JSON body; None: the route has no body.
    - `is_websocket`: the handler receives a WebSocket instead of a request. It must accept the
      WebSocket and returns nothing.
    """

    path: str
    handle: Handler | Callable[[Service, Any], Awaitable[None]]
    methods: tuple[str, ...] = ("GET",)
    further_paths: tuple[str, ...] = ()
    is_public: bool = False
    is_websocket: bool = False
    body_type: type[RequestBody] | None = None
