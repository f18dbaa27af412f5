"""Checks whether two models have the same vocabulary. This is required where token ids of one model
are used with another, for drafts or for comparing probabilities.
"""

import hashlib
from itertools import zip_longest

from llmcli.errors import UserError
from quant.gguf.header import GgufArray
from quant.model_file.model_header import ModelHeader

TOKENS_KEY, TOKEN_TYPES_KEY = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def require_same_vocabulary(model: ModelHeader, draft: ModelHeader, suggestion: str = "") -> None:
    """Raise UserError when the draft model has another vocabulary than the model. `suggestion`: the
    name of a model that can draft, for the hint.
    """
    if difference := describe_difference(model, draft):
        raise UserError(
            f"{draft.path.name} cannot draft for {model.path.name}: "
            f"its vocabulary is different: {difference}",
            hint=f"--model-draft {suggestion}"
            if suggestion
            else "--model-draft takes a smaller model of the same family",
        )


def describe_difference(model: ModelHeader, other: ModelHeader) -> str:
    """Return a description of the first difference between two vocabularies, in their tokenizer,
    size, token texts or token types. Return an empty string when they are equal.
    """
    if _stored(model) == _stored(other):  # the usual case, 100 times as fast
        return ""
    tokens, other_tokens = _tokens(model), _tokens(other)
    if model.tokenizer != other.tokenizer:
        return f"its tokenizer is {other.tokenizer}, but the model's is {model.tokenizer}"
    if len(tokens) != len(other_tokens):
        return f"it has {len(other_tokens)} tokens, but the model has {len(tokens)}"
    for number, (token, other_token) in enumerate(zip(tokens, other_tokens, strict=True)):
        if token != other_token:
            return f"token {number} is {_quote(other_token)}, but the model's is {_quote(token)}"
    for number, (token_type, other_type) in enumerate(zip_longest(_types(model), _types(other))):
        if token_type != other_type:
            name = _quote(tokens[number])
            return f"token {number} ({name}) is of type {other_type}, not {token_type}"
    return ""


def vocabulary_hash(header: ModelHeader) -> str:
    """Return a hash of a vocabulary. It covers everything that `describe_difference` compares."""
    parts = [
        header.tokenizer.encode(),
        *_tokens(header),
        b"types",
        *(str(kind).encode() for kind in _types(header)),
    ]
    return hashlib.sha256(
        b"".join(len(field).to_bytes(4, "little") + field for field in parts)
    ).hexdigest()


def _stored(header: ModelHeader) -> tuple[object, ...]:
    """Return the stored bytes of everything that `describe_difference` compares."""
    arrays = [header.metadata.get(key) for key in (TOKENS_KEY, TOKEN_TYPES_KEY)]
    return (
        header.tokenizer,
        *(
            (array.kind, array.count, array.read_bytes()) if isinstance(array, GgufArray) else None
            for array in arrays
        ),
    )


def _tokens(header: ModelHeader) -> list[bytes]:
    """Return the texts of the tokens in the header. The list is empty when the header has none."""
    value = header.metadata.get(TOKENS_KEY)
    return value.read_strings() if isinstance(value, GgufArray) and value.kind == "string" else []


def _types(header: ModelHeader) -> list[object]:
    """Return the types of the tokens in the header. The list is empty when the header has none."""
    value = header.metadata.get(TOKEN_TYPES_KEY)
    return (
        list(value.read_values()) if isinstance(value, GgufArray) and value.kind != "string" else []
    )


def _quote(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
