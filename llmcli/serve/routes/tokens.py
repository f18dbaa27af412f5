"""`/tokenize` and `/detokenize`, as llama-server has them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.runtime.binding.model import Model
from llmcli.serve.problems import Problem
from llmcli.serve.routes.base import Route, Service
from llmcli.serve.schema.fields import Fields
from llmcli.serve.stream import body, json_response

MOST_TEXT, MOST_PIECES = 1 << 21, 1 << 17


async def tokenize(service: Service, request: Request) -> Response:
    """A text as ids; `with_pieces` adds what each stands for, as text or, where it is none, as
    bytes.
    """
    fields = Fields(await body(request, service.settings.max_body))
    text, around = fields.text("content") or "", fields.flag("add_special")
    special, pieces = fields.flag("parse_special", True), fields.flag("with_pieces")
    model = service.bridge.runner.model
    found = await service.bridge.prepare(
        tokens_of, model, text, around, special, pieces, kind="texts"
    )
    return json_response({"tokens": found})


async def detokenize(service: Service, request: Request) -> Response:
    """Ids as the text that they stand for."""
    fields = Fields(await body(request, service.settings.max_body))
    model = service.bridge.runner.model
    return json_response(
        {"content": await service.bridge.prepare(text_of, model, fields, kind="texts")}
    )


def tokens_of(model: Model, text: str, around: bool, special: bool, pieces: bool) -> list[Any]:
    """The ids of a text, or with pieces; `around` adds what the file puts there, `special` reads
    control tokens.

    Raises Problem for more than one answer should hold.
    """
    if len(text) > MOST_TEXT:
        raise Problem(
            f"content has {len(text):,} characters, at most {MOST_TEXT:,} are taken",
            param="content",
        )
    ids = model.tokenize(text, special=special, add_special=around)
    if pieces and len(ids) > MOST_PIECES:
        raise Problem(
            f"content has {len(ids):,} tokens, at most {MOST_PIECES:,} are told with their pieces",
            param="with_pieces",
        )
    return [{"id": one, "piece": _piece(model, one)} for one in ids] if pieces else ids


def _piece(model: Model, token: int) -> str | list[int]:
    raw = model.piece(token, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def text_of(model: Model, fields: Fields) -> str:
    """The text of `tokens`; raises Problem for what is no token of the model."""
    ids = fields.list("tokens")
    for index, one in enumerate(ids):
        if type(one) is not int or not 0 <= one < model.n_vocab:
            raise Problem(f"tokens[{index}] is no token of this model", param=f"tokens[{index}]")
    return b"".join(model.piece(one, special=True) for one in ids).decode("utf-8", "replace")


ROUTES = (Route("/tokenize", tokenize, ("POST",)), Route("/detokenize", detokenize, ("POST",)))
