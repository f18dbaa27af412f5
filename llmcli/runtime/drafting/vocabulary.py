"""Whether two models mean the same by a token's number: guesses and probabilities are passed on as
numbers.
"""

import hashlib
from itertools import zip_longest

from llmcli.errors import UserError
from quant.container import Array, Header

TEXTS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def refuse_other(model: Header, draft: Header) -> None:
    """Raise UserError where the draft's vocabulary is another."""
    if what := difference(model, draft):
        raise UserError(
            f"{draft.path.name} cannot draft for {model.path.name}, its vocabulary is another: {what}",
            hint="--model-draft takes a smaller model of the same family",
        )


def difference(model: Header, other: Header) -> str:
    """In words, what the other's vocabulary has otherwise: tokenizer, size, texts or types of
    tokens; or nothing.
    """
    mine, yours = _tokens(model), _tokens(other)
    if model.tokenizer != other.tokenizer:
        return f"its tokenizer is {other.tokenizer}, the model's {model.tokenizer}"
    if len(mine) != len(yours):
        return f"{len(yours)} tokens, the model has {len(mine)}"
    for number, (one, another) in enumerate(zip(mine, yours, strict=True)):
        if one != another:
            return f"token {number} is {_shown(another)}, the model's {_shown(one)}"
    for number, (kind, type_) in enumerate(zip_longest(_types(model), _types(other))):
        if kind != type_:
            return f"token {number} ({_shown(mine[number])}) is of type {type_}, not {kind}"
    return ""


def digest(header: Header) -> str:
    """A hash of all that `difference` compares."""
    parts = [
        header.tokenizer.encode(),
        *_tokens(header),
        b"types",
        *(str(kind).encode() for kind in _types(header)),
    ]
    return hashlib.sha256(
        b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    ).hexdigest()


def _tokens(header: Header) -> list[bytes]:
    found = header.metadata.get(TEXTS)
    return found.blobs() if isinstance(found, Array) and found.kind == "string" else []


def _types(header: Header) -> list[object]:
    """Llama.cpp reads as many as there are tokens."""
    found = header.metadata.get(TYPES)
    return list(found.values()) if isinstance(found, Array) and found.kind != "string" else []


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
