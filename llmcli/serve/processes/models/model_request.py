"""Reads from a request which model it names, and writes the messages to a client that waits for
it.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import Message

from llmcli.api.errors import ERROR_TYPES, ApiError
from llmcli.api.forms import find_form
from llmcli.api.forms.base import ApiForm
from llmcli.api.stream_resume import MARKS_KEY
from llmcli.serve.http import api_keys
from llmcli.serve.http.exchange import parse_json
from llmcli.serve.processes.front import PROGRESS_KEY
from llmcli.units import parse_duration

MAX_ERROR_BYTES = 1 << 16  # bytes of an error document that are read


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a server of several models must know of a request.

    - `name`: the model that it names; None: it names none.
    - `keep_alive`: seconds for which the model stays loaded; None: the server's default.
    - `form`: the class of its API form if its answer is a stream that can have signs of life.
    """

    name: str | None
    keep_alive: float | None = None
    form: type[ApiForm] | None = None

    @property
    def shows_progress(self) -> bool:
        """Whether its client gets signs of life while it waits for its model."""
        return self.form is not None


async def read_model_request(scope: dict[str, Any], body: bytes) -> ModelRequest:
    """Return what a request contains about its model: in its body, or in `?model=` without one. Raises
    ApiError if the body is not a JSON object, or if a field is wrong.
    """
    document = await parse_json(body) if body else {}
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    name = document.get("model") or document.get("name") or query.get("model", [None])[0]
    if name is not None and not isinstance(name, str):
        raise ApiError("model must be text", param="model")
    form = find_form(scope["path"])
    return ModelRequest(
        name,
        read_keep_alive(document.get("keep_alive")),
        form
        if form and form.ping and document.get("stream", form.streams_by_default) is True
        else None,
    )


def read_client(scope: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return the id of the client of a request, as a server of one model. `keys`: the API keys."""
    address = (scope.get("client") or ("",))[0]
    return api_keys.client_id(Headers(raw=list(scope.get("headers", ()))), address, keys)


def read_keep_alive(value: Any) -> float | None:
    """Return the seconds of the field `keep_alive`, infinite for a negative one. Raises
    ApiError.
    """
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ApiError(f"keep_alive: {error}", param="keep_alive") from None


def progress_messages(
    request: ModelRequest, name: str, state: str, n_sent: int
) -> Iterator[Message]:
    """Yield the ASGI messages that report to a stream's client that the model `name` is in a `state`.
    In streams of events they are comments, which clients ignore. Streams of JSON lines have nothing
    that clients ignore but spaces before an object, so that they tell no state. `n_sent`: how many
    were sent before.
    """
    if request.form is None:
        return
    marks = {MARKS_KEY: (), PROGRESS_KEY: True}
    if not n_sent:
        headers = [
            (b"content-type", f"{request.form.media_type}; charset=utf-8".encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        yield {"type": "http.response.start", "status": 200, "headers": headers, **marks}
    has_comments = request.form.ping.startswith(b":")
    line = f": {name} is {state}\n\n".encode() if has_comments else request.form.ping
    yield {"type": "http.response.body", "body": line, "more_body": True, **marks}


async def answer_messages(
    messages: AsyncIterator[Message], has_head: bool
) -> AsyncIterator[Message]:
    """Yield the messages of a model's answer. `has_head`: the client has a head already; then an
    answer that is an error is raised as ApiError.
    """
    refused_status, raw = 0, b""
    async for message in messages:
        if has_head and message["type"] == "http.response.start" and message["status"] != 200:
            refused_status = message["status"]
        elif refused_status:
            raw += message.get("body", b"")[: MAX_ERROR_BYTES - len(raw)]
        else:
            yield message
    if refused_status:
        status = refused_status if refused_status in ERROR_TYPES else 500
        raise ApiError(_error_text(raw) or HTTPStatus(refused_status).phrase, status)


def _error_text(raw: bytes) -> str:
    """Return the message of an error document; "" if it has none."""
    try:
        error = json.loads(raw)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
