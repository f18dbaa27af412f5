"""llama-server's endpoints `/tokenize` and `/detokenize`."""

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.tokens import DetokenizeBody, TokenizeBody, decode_tokens, encode_text
from llmcli.serve.http.exchange import (
    json_response,
    large_json_response,
    read_checked_body,
)
from llmcli.serve.http.service import Route, Service


async def tokenize(service: Service, request: Request) -> Response:
    """Respond with the token ids of a text. With `with_pieces`, respond with objects that also have
    the text of each token, or its bytes if they are not valid UTF-8.
    """
    body = await read_checked_body(request, service.settings.max_body, TokenizeBody)
    tokens = await service.bridge.run_in_worker(
        encode_text,
        service.bridge.runner.model,
        body.content or "",
        bool(body.add_special),
        body.parse_special is not False,
        bool(body.with_pieces),
        kind="texts",
    )
    return await large_json_response({"tokens": tokens})


async def detokenize(service: Service, request: Request) -> Response:
    """Respond with the text of a list of token ids."""
    body = await read_checked_body(request, service.settings.max_body, DetokenizeBody)
    model = service.bridge.runner.model
    text = await service.bridge.run_in_worker(decode_tokens, model, body.tokens or [], kind="texts")
    return json_response({"content": text})


ROUTES = (
    Route("/tokenize", tokenize, ("POST",), body_type=TokenizeBody),
    Route("/detokenize", detokenize, ("POST",), body_type=DetokenizeBody),
)
