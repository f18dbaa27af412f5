"""`/tokenize` and `/detokenize`, as in llama-server."""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.fields import Fields
from llmcli.api.tokens import decode_tokens, encode_text
from llmcli.serve.http.exchange import json_response, read_body
from llmcli.serve.http.service import Route, Service


async def tokenize(service: Service, request: Request) -> Response:
    """Respond with the token ids of a text. With `with_pieces`, the response also has the text of
    each token, or its bytes if they are not valid UTF-8.
    """
    fields = Fields(await read_body(request, service.settings.max_body))
    text, around = fields.text("content") or "", fields.flag("add_special")
    special, pieces = fields.flag("parse_special", True), fields.flag("with_pieces")
    model = service.bridge.runner.model
    tokens = await service.bridge.run_in_worker(
        encode_text, model, text, around, special, pieces, kind="texts"
    )
    return json_response({"tokens": tokens})


async def detokenize(service: Service, request: Request) -> Response:
    """Respond with the text for a list of token ids."""
    fields = Fields(await read_body(request, service.settings.max_body))
    model = service.bridge.runner.model
    return json_response(
        {"content": await service.bridge.run_in_worker(decode_tokens, model, fields, kind="texts")}
    )


ROUTES = (Route("/tokenize", tokenize, ("POST",)), Route("/detokenize", detokenize, ("POST",)))
