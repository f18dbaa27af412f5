"""Extracts the JSON objects from an HTTP response that an ASGI application sends: the chunks of its
stream, or the whole body.
"""

import asyncio
import json
from typing import Any

from starlette.types import Message

from llmcli.api.errors import ApiError

SEPARATORS = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}


class AnswerDocuments:
    """Collects the JSON objects of one response. Pass the method `send` to the application as its
    send function. `queue` receives each object, and None after close(). Then call raise_error(),
    which raises the error that the response contains, if any.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._status, self._separator, self._buffer = 500, b"", b""
        self._error: dict[str, Any] | None = None
        self._ended = False

    async def send(self, message: Message) -> None:
        """Process an ASGI message of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            content_types = [
                value.decode("latin-1")
                for name, value in message["headers"]
                if name.lower() == b"content-type"
            ]
            self._separator = SEPARATORS.get("".join(content_types).partition(";")[0], b"")
        elif message["type"] == "http.response.body":
            self._buffer += message.get("body", b"")
            if self._separator:
                *complete, self._buffer = self._buffer.split(self._separator)
                for piece in complete:
                    self._add_document(piece)
            elif not message.get("more_body") and self._buffer:
                self._add_document(self._buffer)
            self._ended = not message.get("more_body")

    def close(self, _: object) -> None:
        """Put None into the queue, as its end. The parameter allows this method to be a task's done
        callback.
        """
        self.queue.put_nowait(None)

    def raise_error(self) -> None:
        """Raise ApiError if the response was an error, ended with an error, or is incomplete."""
        if self._error is None:
            if not self._ended:
                raise ApiError(
                    "the model was lost during this answer; try again",
                    503,
                    code="model_lost",
                )
            return
        fields = dict(self._error)
        message, error_type = str(fields.pop("message", "")), fields.pop("type", None)
        status = self._status if self._status >= 400 else 503
        raise ApiError(
            message,
            status,
            type=error_type or "server_error",
            param=fields.pop("param", None),
            code=fields.pop("code", None),
            **fields,
        )

    def _add_document(self, piece: bytes) -> None:
        """Parse a JSON object, or the Server-Sent Event that contains one, and put it into the
        queue.
        """
        if self._separator == SEPARATORS["text/event-stream"]:
            piece = b"".join(line[6:] for line in piece.split(b"\n") if line.startswith(b"data: "))
        if not piece or piece == b"[DONE]":
            return
        document = json.loads(piece)
        # /completion returns a list if there are several answers. /v1/responses returns objects
        # whose `error` is null.
        error = document.get("error") if isinstance(document, dict) else None
        if error and (self._status >= 400 or document.keys() <= {"error", "type"}):
            self._error = error if isinstance(error, dict) else {"message": error}
        else:
            self.queue.put_nowait(document)
