"""The routes of all API forms (api/forms/base.py): chat completions, completions and so on. A
response is a JSON object, or Server-Sent Events while tokens are generated.
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.forms import FORMS, further_paths
from llmcli.serve.http.exchange import SHORT_BODY_BYTES, build_form, read_body, respond
from llmcli.serve.http.service import Route, Service


async def answer_request(path: str, service: Service, request: Request) -> Response:
    """Answer a request: parse its body with the form of its path, submit the form's requests to the
    engine, and respond. `path`: the form's own path.
    """
    document = await read_body(request, service.settings.max_body)
    # uvicorn has checked that the length is a number
    is_short = int(request.headers.get("content-length", SHORT_BODY_BYTES + 1)) <= SHORT_BODY_BYTES
    form = await build_form(service.bridge, path, document, service.settings, is_short)
    return await respond(service, request, form)


ROUTES = tuple(
    Route(
        path,
        partial(answer_request, path),
        ("POST",),
        further_paths(path),
        body_type=form.body_type,
    )
    for path, form in FORMS.items()
)
