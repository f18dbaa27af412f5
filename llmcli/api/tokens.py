"""Converts text to token ids and back for `/tokenize` and `/detokenize`."""

from typing import Any, ClassVar

from llmcli.api.bodies.base import RequestBody, honored, ignored, refused
from llmcli.api.errors import ApiError
from llmcli.runtime.binding.model import Model

MAX_TEXT_CHARACTERS, MAX_PIECES = 1 << 21, 1 << 17


class TokenizeBody(RequestBody):
    """A text to tokenize."""

    origin: ClassVar[str] = "llama-server"
    content: str | None = honored("the text")
    add_special: bool | None = honored("add the tokens that the model expects around a text")
    parse_special: bool | None = honored("false reads the names of control tokens as text")
    with_pieces: bool | None = honored("return the text of each token")
    model: Any = ignored("the served model is used")


class DetokenizeBody(RequestBody):
    """Tokens to write as text."""

    origin: ClassVar[str] = "llama-server"
    tokens: list[Any] | None = honored("the token ids")
    model: Any = ignored("the served model is used")


class PromptObject(RequestBody):
    """A text as an object. A request may have thousands of them, so unknown fields are not compared
    with known ones.
    """

    origin: ClassVar[str] = "llama-server"
    reports_unknown: ClassVar[bool] = False
    prompt_string: str | None = honored("the text")
    multimodal_data: Any = refused("this server reads only text")


def encode_text(
    model: Model, text: str, add_special: bool, parse_special: bool, with_pieces: bool
) -> list[Any]:
    """Return the token ids of a text. With `with_pieces`, return instead an object for each token
    with its id and its text.

    `add_special`: add the tokens that the model expects around a text, such as BOS.
    `parse_special`: treat the names of control tokens in the text as these tokens. Raises ApiError
    for a text that is too long.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise ApiError(
            f"content has {len(text):,} characters; the limit is {MAX_TEXT_CHARACTERS:,}",
            param="content",
        )
    ids = model.tokenize(text, special=parse_special, add_special=add_special)
    if with_pieces and len(ids) > MAX_PIECES:
        raise ApiError(
            f"content has {len(ids):,} tokens; the limit with pieces is {MAX_PIECES:,}",
            param="with_pieces",
        )
    return [{"id": id_, "piece": _piece(model, id_)} for id_ in ids] if with_pieces else ids


def _piece(model: Model, token: int) -> str | list[int]:
    """Return a token's text, or the list of its byte values if they are not valid UTF-8."""
    raw = model.piece(token, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def decode_tokens(model: Model, ids: list[Any]) -> str:
    """Return the text of token ids. Raises ApiError for an id that the model does not have."""
    for index, id_ in enumerate(ids):
        if type(id_) is not int or not 0 <= id_ < model.n_vocab:
            raise ApiError(
                f"tokens[{index}] is not a token of this model", param=f"tokens[{index}]"
            )
    return b"".join(model.piece(id_, special=True) for id_ in ids).decode("utf-8", "replace")
