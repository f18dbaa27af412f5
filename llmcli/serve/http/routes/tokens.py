"""llama-server's endpoints `/tokenize` and `/detokenize`."""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.fields import Fields
from llmcli.api.tokens import decode_tokens, encode_text
from llmcli.serve.http.exchange import json_response, large_json_response, read_body
from llmcli.serve.http.service import Route, Service


async def tokenize(service: Service, request: Request) -> Response:
    """Respond with the token ids of a text. With `with_pieces`, respond with objects that also have
    the text of each token, or its bytes if they are not valid UTF-8.
    """
    fields = Fields(await read_body(request, service.settings.max_body))
    text, add_special = fields.text("content") or "", fields.flag("add_special")
    parse_special, with_pieces = fields.flag("parse_special", True), fields.flag("with_pieces")
    model = service.bridge.runner.model
    tokens = await service.bridge.run_in_worker(
        encode_text, model, text, add_special, parse_special, with_pieces, kind="texts"
    )
    return await large_json_response({"tokens": tokens})


async def detokenize(service: Service, request: Request) -> Response:
    """Respond with the text of a list of token ids."""
    fields = Fields(await read_body(request, service.settings.max_body))
    model = service.bridge.runner.model
    return json_response(
        {"content": await service.bridge.run_in_worker(decode_tokens, model, fields, kind="texts")}
    )


ROUTES = (Route("/tokenize", tokenize, ("POST",)), Route("/detokenize", detokenize, ("POST",)))
