"""What a route is: paths, and a function from a request to a response. Adding one is a new file in
this folder.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve.bodies import Room
from llmcli.serve.bridge import Bridge
from llmcli.serve.settings import Settings
from llmcli.serve.vectors import Vectors


@dataclass(frozen=True, slots=True)
class Service:
    """What every handler works with."""

    bridge: Bridge
    settings: Settings
    vectors: Vectors
    room: Room  # for large requests, over whichever protocol
    talks: "set[asyncio.Task[None]]" = field(
        default_factory=set
    )  # answers on their way over WebSockets


Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """`paths` are further names of the same; `open` ones need no key. `socket`: `handle` takes a
    WebSocket, accepted by itself, and returns nothing; whether its key is right has been asked.
    """

    path: str
    handle: Handler | Callable[[Service, Any], Awaitable[None]]
    methods: tuple[str, ...] = ("GET",)
    paths: tuple[str, ...] = ()
    open: bool = False
    socket: bool = False
