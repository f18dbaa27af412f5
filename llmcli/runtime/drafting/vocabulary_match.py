"""Checks whether two models have the same vocabulary. This must be so where drafts and
probabilities are exchanged as token ids.
"""

import hashlib
from itertools import zip_longest

from llmcli.errors import UserError
from quant.gguf.header import GgufArray
from quant.model_file.model_header import ModelHeader

TOKENS_KEY, TOKEN_TYPES_KEY = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def require_same_vocabulary(model: ModelHeader, draft: ModelHeader) -> None:
    """Raise UserError when the draft model has another vocabulary."""
    if what := describe_difference(model, draft):
        raise UserError(
            f"{draft.path.name} cannot draft for {model.path.name}: "
            f"its vocabulary is different: {what}",
            hint="--model-draft takes a smaller model of the same family",
        )


def describe_difference(model: ModelHeader, other: ModelHeader) -> str:
    """Return in words how the vocabulary of `other` differs: in tokenizer, size, texts or types of
    tokens. The text is empty when the vocabularies are equal.
    """
    tokens, other_tokens = _tokens(model), _tokens(other)
    if model.tokenizer != other.tokenizer:
        return f"its tokenizer is {other.tokenizer}, but the model's is {model.tokenizer}"
    if len(tokens) != len(other_tokens):
        return f"it has {len(other_tokens)} tokens, but the model has {len(tokens)}"
    for number, (token, other_token) in enumerate(zip(tokens, other_tokens, strict=True)):
        if token != other_token:
            return f"token {number} is {_shown(other_token)}, but the model's is {_shown(token)}"
    for number, (token_type, other_type) in enumerate(zip_longest(_types(model), _types(other))):
        if token_type != other_type:
            name = _shown(tokens[number])
            return f"token {number} ({name}) is of type {other_type}, not {token_type}"
    return ""


def vocabulary_hash(header: ModelHeader) -> str:
    """Return a hash of everything in a vocabulary that `describe_difference` compares."""
    parts = [
        header.tokenizer.encode(),
        *_tokens(header),
        b"types",
        *(str(kind).encode() for kind in _types(header)),
    ]
    return hashlib.sha256(
        b"".join(len(field).to_bytes(4, "little") + field for field in parts)
    ).hexdigest()


def _tokens(header: ModelHeader) -> list[bytes]:
    value = header.metadata.get(TOKENS_KEY)
    return value.read_strings() if isinstance(value, GgufArray) and value.kind == "string" else []


def _types(header: ModelHeader) -> list[object]:
    """Return the token types in the header; empty when it has none."""
    value = header.metadata.get(TOKEN_TYPES_KEY)
    return (
        list(value.read_values()) if isinstance(value, GgufArray) and value.kind != "string" else []
    )


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
