"""Gives every response the header `x-request-id`, which clients show to a person who looks for a
request in a log. It is the one of the request, if the client has sent one.
"""

import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"  # the name that Anthropic's clients look for
MAX_ID_CHARACTERS = 128


class RequestIdMiddleware:
    """ASGI middleware that adds the header to responses which have none. It must be the outermost
    one, so that refused requests get an id, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request. It receives the id as a header of the request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(HEADER.decode(), "")
        is_valid = 0 < len(sent) <= MAX_ID_CHARACTERS and sent.isascii() and sent.isprintable()
        request_id = (sent if is_valid else f"req_{uuid.uuid4().hex}").encode()
        others = [(name, value) for name, value in scope["headers"] if name.lower() != HEADER]
        is_anthropic = scope["path"].removeprefix("/v1").startswith("/messages")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if all(name.lower() != HEADER for name, _ in headers):
                    headers.append((HEADER, request_id))
                    headers += [(ANTHROPIC_HEADER, request_id)] if is_anthropic else []
                message = {**message, "headers": headers}
            await send(message)

        await self.app({**scope, "headers": [*others, (HEADER, request_id)]}, receive, send_with_id)
