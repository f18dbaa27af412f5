"""llama-server's `/v1/chat/completions/control`: changes a running answer. Its one action ends the
thinking, so that the reply follows.
"""

from typing import ClassVar, Literal

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies.base import RequestBody, honored
from llmcli.api.errors import ApiError
from llmcli.serve.http import api_keys
from llmcli.serve.http.exchange import json_response, read_checked_body
from llmcli.serve.http.service import Route, Service

MAX_SHOWN_CHARACTERS = 100  # of an id in an error message


class AnswerControlBody(RequestBody):
    """A change of a running answer."""

    origin: ClassVar[str] = "llama-server"
    id: str = honored("the id of the response, which each chunk of its stream has", ...)
    action: Literal["reasoning_end"] = honored("reasoning_end: end the thinking now", ...)


async def control_answer(service: Service, request: Request) -> Response:
    """End the thinking of a running answer. Respond with `success`, which is false if the answer
    does not think any more. Raises ApiError (404) for an id that no running answer of this client
    has.
    """
    body = await read_checked_body(request, service.settings.max_body, AnswerControlBody)
    client = api_keys.connected_client(request, service.settings.keys)
    success = await service.bridge.end_thinking(body.id, client)
    if success is None:
        shown = body.id[:MAX_SHOWN_CHARACTERS]
        raise ApiError(f"no running answer has the id {shown!r}", 404, param="id", code="not_found")
    return json_response({"id": body.id, "action": body.action, "success": success})


ROUTES = (
    Route(
        "/v1/chat/completions/control",
        control_answer,
        ("POST",),
        ("/chat/completions/control",),
        body_type=AnswerControlBody,
    ),
)
