"""The service that all routes share, and what a route is: paths and a function from a request to a
response. Adding a route is a new file in routes/.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.server_settings import ServerSettings
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.embedding_queue import EmbeddingQueue
from llmcli.serve.http.body_budget import BodyBudget


@dataclass(frozen=True, slots=True)
class Service:
    """What every handler works with."""

    bridge: EngineBridge
    settings: ServerSettings
    embedding_queue: EmbeddingQueue
    body_budget: BodyBudget  # memory of large requests, of every protocol
    socket_answers: "set[asyncio.Task[None]]" = field(
        default_factory=set
    )  # running WebSocket answers


Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One or more paths and their handler. `further_paths`: further paths of the same route;
    `is_public`: no key is needed. `is_websocket`: the handler receives a WebSocket whose key was
    checked, accepts it and returns nothing.
    """

    path: str
    handle: Handler | Callable[[Service, Any], Awaitable[None]]
    methods: tuple[str, ...] = ("GET",)
    further_paths: tuple[str, ...] = ()
    is_public: bool = False
    is_websocket: bool = False
