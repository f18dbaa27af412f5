"""llama-server's `/v1/chat/completions/control`: changes a running answer. Its one action ends the
thinking, so that the reply follows.
"""

from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies import checks
from llmcli.api.bodies.base import RequestBody, honored
from llmcli.api.errors import ApiError
from llmcli.serve.http import api_keys
from llmcli.serve.http.exchange import json_response, read_body
from llmcli.serve.http.service import Route, Service

CONTROL_PATHS = ("/v1/chat/completions/control", "/chat/completions/control")
END_THINKING: Literal["reasoning_end"] = "reasoning_end"
MAX_SHOWN_CHARACTERS = 100  # of an id in an error message


class AnswerControlBody(RequestBody):
    """A change of a running answer."""

    origin: ClassVar[str] = "llama-server"
    id: str = honored("the id of the response, which each chunk of its stream has", ...)
    action: Literal["reasoning_end"] = honored("reasoning_end: end the thinking now", ...)


def parse_control(document: dict[str, Any], path: str) -> AnswerControlBody:
    """Return the JSON object of a request for `path` as a change. Raises ApiError if it is none."""
    return checks.read_body(AnswerControlBody, document, [], path)


def unknown_answer(body: AnswerControlBody) -> ApiError:
    """Return the error for an id that no running answer of the client has."""
    shown = body.id[:MAX_SHOWN_CHARACTERS]
    return ApiError(f"no running answer has the id {shown!r}", 404, param="id", code="not_found")


async def control_answer(service: Service, request: Request) -> Response:
    """End the thinking of a running answer. Respond with `success`, which is false if the answer
    does not think any more. Raises ApiError (404) for an id that no running answer of this client
    has.
    """
    document = await read_body(request, service.settings.max_body)
    body = parse_control(document, request.scope["path"])
    client = api_keys.connected_client(request, service.settings.keys)
    success = await service.bridge.end_thinking(body.id, client)
    if success is None:
        raise unknown_answer(body)
    return json_response({"id": body.id, "action": body.action, "success": success})


ROUTES = (
    Route(
        CONTROL_PATHS[0],
        control_answer,
        ("POST",),
        CONTROL_PATHS[1:],
        body_type=AnswerControlBody,
    ),
)
