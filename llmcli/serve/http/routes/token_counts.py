"""Counts the prompt tokens of a request: Anthropic's `/v1/messages/count_tokens`, OpenAI's
`…/input_tokens`.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api import registry
from llmcli.serve.http.exchange import asked, body, json_response
from llmcli.serve.http.service import Route, Service

MESSAGES = "/v1/messages"


async def count(path: str, service: Service, request: Request) -> Response:
    """Respond with the number of prompt tokens: the request is built, template included, but not
    submitted.
    """
    document = await body(request, service.settings.max_body)
    form = await asked(service.bridge, path, document, service.settings)
    n_tokens = sum(len(form_request.tokens) for form_request in form.requests)
    extra = {} if path == MESSAGES else {"object": "response.input_tokens"}
    return json_response({**extra, "input_tokens": n_tokens})


ROUTES = tuple(
    Route(
        f"{path}/{'count_tokens' if path == MESSAGES else 'input_tokens'}",
        partial(count, path),
        ("POST",),
    )
    for path in registry.forms()
    if path.startswith("/v1/")
)
