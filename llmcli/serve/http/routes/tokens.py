"""`/tokenize` and `/detokenize`, as in llama-server."""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.fields import Fields
from llmcli.api.tokens import text_of, tokens_of
from llmcli.serve.http.exchange import body, json_response
from llmcli.serve.http.service import Route, Service


async def tokenize(service: Service, request: Request) -> Response:
    """Respond with the token ids of a text; with `with_pieces` also with the text of each token, or
    its bytes if it is not valid text.
    """
    fields = Fields(await body(request, service.settings.max_body))
    text, around = fields.text("content") or "", fields.flag("add_special")
    special, pieces = fields.flag("parse_special", True), fields.flag("with_pieces")
    model = service.bridge.runner.model
    tokens = await service.bridge.prepare(
        tokens_of, model, text, around, special, pieces, kind="texts"
    )
    return json_response({"tokens": tokens})


async def detokenize(service: Service, request: Request) -> Response:
    """Respond with the text of token ids."""
    fields = Fields(await body(request, service.settings.max_body))
    model = service.bridge.runner.model
    return json_response(
        {"content": await service.bridge.prepare(text_of, model, fields, kind="texts")}
    )


ROUTES = (Route("/tokenize", tokenize, ("POST",)), Route("/detokenize", detokenize, ("POST",)))
