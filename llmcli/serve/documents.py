"""Reads an HTTP answer back: ASGI messages in, the JSON documents that they carry out."""

import asyncio
import json
from typing import Any

from starlette.types import Message

from llmcli.serve.problems import Problem

SEPARATORS = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}


class Documents:
    """Give `send` to the application. `queue` gets each document, then None; after that check()
    raises the answer's error, if it was one.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._status, self._between, self._held = 500, b"", b""
        self._error: dict[str, Any] | None = None
        self._ended = False

    async def send(self, message: Message) -> None:
        """A message of the application."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kinds = [
                value.decode("latin-1")
                for name, value in message["headers"]
                if name.lower() == b"content-type"
            ]
            self._between = SEPARATORS.get("".join(kinds).partition(";")[0], b"")
        elif message["type"] == "http.response.body":
            self._held += message.get("body", b"")
            if self._between:
                *whole, self._held = self._held.split(self._between)
                for piece in whole:
                    self._take(piece)
            elif not message.get("more_body") and self._held:
                self._take(self._held)
            self._ended = not message.get("more_body")

    def over(self, _: object) -> None:
        """Nothing more comes."""
        self.queue.put_nowait(None)

    def check(self) -> None:
        """Raise Problem for an answer that was an error, or became one."""
        if self._error is None:
            if not self._ended:
                raise Problem(
                    "the model was lost in the middle of this answer; ask again",
                    503,
                    code="model_lost",
                )
            return
        about = dict(self._error)
        message, sort = str(about.pop("message", "")), about.pop("type", None)
        status = self._status if self._status >= 400 else 503
        raise Problem(
            message,
            status,
            type=sort or "server_error",
            param=about.pop("param", None),
            code=about.pop("code", None),
            **about,
        )

    def _take(self, piece: bytes) -> None:
        if self._between == SEPARATORS["text/event-stream"]:
            piece = b"".join(line[6:] for line in piece.split(b"\n") if line.startswith(b"data: "))
        if not piece or piece == b"[DONE]":
            return
        found = json.loads(piece)
        error = (
            found.get("error") if isinstance(found, dict) else None
        )  # several answers of /completion are a list
        # A whole response of OpenAI's newer form has the field, too: null.
        if error and (self._status >= 400 or found.keys() <= {"error", "type"}):
            self._error = error if isinstance(error, dict) else {"message": error}
        else:
            self.queue.put_nowait(found)
