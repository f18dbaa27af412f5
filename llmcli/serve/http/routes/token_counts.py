"""Counts the prompt tokens of a request without answering it: Anthropic's
`/v1/messages/count_tokens` and OpenAI's `/v1/…/input_tokens`.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.forms import FORMS
from llmcli.serve.http.exchange import build_form, json_response, read_body
from llmcli.serve.http.service import Route, Service

MESSAGES_PATH = "/v1/messages"


async def count_tokens(path: str, service: Service, request: Request) -> Response:
    """Respond with the number of prompt tokens. The prompt is rendered and tokenized, but not
    submitted to the engine. `path`: the path of the API whose requests are counted.
    """
    document = await read_body(request, service.settings.max_body)
    form = await build_form(service.bridge, path, document, service.settings)
    n_tokens = sum(len(form_request.tokens) for form_request in form.requests)
    extra = {} if path == MESSAGES_PATH else {"object": "response.input_tokens"}
    return json_response({**extra, "input_tokens": n_tokens})


def _count_path(path: str) -> str:
    """Return the path that counts the tokens of requests to a path."""
    return f"{path}/{'count_tokens' if path == MESSAGES_PATH else 'input_tokens'}"


ROUTES = tuple(
    Route(
        _count_path(path),
        partial(count_tokens, path),
        ("POST",),
        (_count_path(path).removeprefix("/v1"),),
        body_type=form.body_type,
    )
    for path, form in FORMS.items()
    if path.startswith("/v1/")
)
