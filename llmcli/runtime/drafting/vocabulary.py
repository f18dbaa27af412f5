"""Whether two models mean the same by a token's number: guesses are passed on as numbers."""

from itertools import zip_longest

from llmcli.errors import UserError
from quant.container import Array, Header

TEXTS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def refuse_other(model: Header, draft: Header) -> None:
    """Raise UserError where the draft's vocabulary is another: its tokenizer, size, texts or types of tokens."""
    mine, yours = _tokens(model), _tokens(draft)
    if model.tokenizer != draft.tokenizer:
        raise _other(model, draft, f"its tokenizer is {draft.tokenizer}, the model's {model.tokenizer}")
    if len(mine) != len(yours):
        raise _other(model, draft, f"{len(yours)} tokens, the model has {len(mine)}")
    for number, (one, other) in enumerate(zip(mine, yours, strict=True)):
        if one != other:
            raise _other(model, draft, f"token {number} is {_shown(other)}, the model's {_shown(one)}")
    for number, (kind, another) in enumerate(zip_longest(_types(model), _types(draft))):
        if kind != another:
            raise _other(model, draft, f"token {number} ({_shown(mine[number])}) is of type {another}, not {kind}")


def _tokens(header: Header) -> list[bytes]:
    found = header.metadata.get(TEXTS)
    return found.blobs() if isinstance(found, Array) and found.kind == "string" else []


def _types(header: Header) -> list[object]:
    """Llama.cpp reads as many as there are tokens."""
    found = header.metadata.get(TYPES)
    return list(found.values()) if isinstance(found, Array) and found.kind != "string" else []


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))


def _other(model: Header, draft: Header, what: str) -> UserError:
    return UserError(
        f"{draft.path.name} cannot draft for {model.path.name}, its vocabulary is another: {what}",
        hint="--model-draft takes a smaller model of the same family",
    )
