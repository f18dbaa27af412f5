"""ollama's endpoints that change which models a server has: `/api/pull`, `/api/create`, `/api/copy`,
`/api/delete`, `/api/push` and `/api/blobs`. This server has one model, which it was started with:
pulling that one succeeds at once, and everything else is refused with the command that does it.
"""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies.base import honored, ignored
from llmcli.api.errors import ApiError
from llmcli.api.forms.base import encode_json
from llmcli.api.forms.ollama import is_listed
from llmcli.serve.http.exchange import json_response, read_checked_body
from llmcli.serve.http.routes.ollama import ModelBody
from llmcli.serve.http.service import Route, Service

PULL_STATUSES = "pulling manifest", "verifying sha256 digest", "writing manifest", "success"
# By path: the command that does what the endpoint is asked for. {name}: the model.
COMMANDS = {
    "/api/create": "llmcli quantize, or llmcli alias for settings of a model",
    "/api/copy": "llmcli serve {name} --alias NEW",
    "/api/push": "the hub's own program, huggingface-cli upload",
}


class ModelNameBody(ModelBody):
    """The name of a model to pull or to delete."""

    stream: bool | None = honored("send the steps as lines, which is the default")
    insecure: Any = ignored("nothing is downloaded")
    username: Any = ignored("nothing is downloaded")
    password: Any = ignored("nothing is downloaded")


class ChangeBody(ModelNameBody):
    """A change of models, which is refused."""

    source: str | None = honored("the model in the answer's advice")
    destination: Any = ignored("the request is refused")
    from_: Any = ignored("the request is refused", alias="from")
    files: Any = ignored("the request is refused")
    adapters: Any = ignored("the request is refused")
    template: Any = ignored("the request is refused")
    license: Any = ignored("the request is refused")
    system: Any = ignored("the request is refused")
    parameters: Any = ignored("the request is refused")
    messages: Any = ignored("the request is refused")
    quantize: Any = ignored("the request is refused")
    modelfile: Any = ignored("the request is refused")


def pulled_response(body: ModelNameBody) -> Response:
    """Respond to a request to pull a model that is here: as ollama does after a download."""
    if body.stream is False:
        return json_response({"status": PULL_STATUSES[-1]})
    lines = [encode_json({"status": status}) + b"\n" for status in PULL_STATUSES]
    return Response(b"".join(lines), media_type="application/x-ndjson")


async def pull_model(service: Service, request: Request) -> Response:
    """Report that the served model is here. A model that is not served is not downloaded."""
    body = await read_checked_body(request, service.settings.max_body, ModelNameBody)
    requested = body.requested
    if not is_listed(requested, service.settings):
        raise ApiError(
            f"this server serves only {', '.join(service.settings.names)}, and downloads nothing;"
            f" start another: llmcli serve {requested[:100]}",
            404,
            param="model",
            code="model_not_found",
        )
    return pulled_response(body)


async def refuse_change(path: str, service: Service, request: Request) -> Response:
    """Refuse to create, copy or upload a model, and name the command that does it."""
    body = await read_checked_body(request, service.settings.max_body, ChangeBody)
    name = body.source or body.model or service.settings.model_name
    command = COMMANDS[path].format(name=name[:100])
    raise ApiError(f"this server cannot do that; use {command}", 501)


async def refuse_delete(service: Service, request: Request) -> Response:
    """Refuse to delete the served model. Another one is not here."""
    body = await read_checked_body(request, service.settings.max_body, ModelNameBody)
    name = body.requested
    if not is_listed(name, service.settings):
        raise ApiError(f"model '{name[:100]}' not found", 404, param="model")
    raise ApiError(f"this server cannot delete its model; use llmcli rm {name[:100]}", 501)


async def refuse_blob(service: Service, request: Request) -> Response:
    """Refuse an uploaded file. A client first asks with HEAD whether it is here."""
    if request.method == "HEAD":
        raise ApiError("there is no such blob", 404)
    raise ApiError("this server stores no blobs; use llmcli pull or llmcli quantize", 501)


ROUTES = (
    Route("/api/pull", pull_model, ("POST",), body_type=ModelNameBody),
    Route("/api/delete", refuse_delete, ("DELETE",), body_type=ModelNameBody),
    Route("/api/blobs/{digest}", refuse_blob, ("POST", "HEAD")),
    *(
        Route(path, partial(refuse_change, path), ("POST",), body_type=ChangeBody)
        for path in COMMANDS
    ),
)
