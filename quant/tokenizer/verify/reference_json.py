"""Builds a tokenizer.json from a model's pieces, for the tokenizers library to run as the
reference.

Used for SentencePiece BPE models, whose merges are derived from scores as transformers does, and
for Unigram models, because the library would match their unknown and control pieces in text.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quant.tokenizer.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceToken,
)
from quant.tokenizer.token_table import AddedToken

MAX_MERGED_CHARS = 256  # characters; longer pieces get no merges
HIDDEN_UNKNOWN = "\0"  # the unknown token's text; no probe string contains it
Json = dict[str, Any]


def build_tokenizer_json(model: Json, added: Mapping[int, AddedToken]) -> Json:
    """Return a tokenizer.json that only finds added tokens: no normalizer, no pre-tokenizer."""
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    added_tokens = [
        {"id": index, "content": token.text} | {name: getattr(token, name) for name in flags}
        for index, token in sorted(added.items())
        if token.text
    ]
    return {
        "version": "1.0",
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": None,
        "model": model,
    }


def added_from_pieces(pieces: Mapping[int, SentencePieceToken]) -> dict[int, AddedToken]:
    """Return the pieces that are matched in the text before it is split: unknown, control and
    user-defined.
    """
    matched_types = (UNKNOWN, CONTROL, USER_DEFINED)
    return {
        index: AddedToken(piece.text, special=piece.type != USER_DEFINED)
        for index, piece in pieces.items()
        if piece.type in matched_types
    }


def build_bpe(pieces: Mapping[int, SentencePieceToken]) -> Json:
    """Return SentencePiece's BPE as a model: the pair that makes the piece with the highest score
    is merged first.
    """
    ids = {piece.text: index for index, piece in pieces.items()}
    merges = sorted(_merges(pieces.values(), ids), key=lambda merge: merge[0], reverse=True)
    unknown = next((piece.text for piece in pieces.values() if piece.type == UNKNOWN), None)
    fallback = any(piece.type == BYTE for piece in pieces.values())
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": fallback,
        "ignore_merges": False,
        "vocab": ids,
        "merges": [[left, right] for _, left, right in merges],
    }


def _merges(
    pieces: Iterable[SentencePieceToken], ids: Mapping[str, int]
) -> Iterator[tuple[tuple[float, int], str, str]]:
    for piece in pieces:
        text = piece.text
        if (
            piece.type not in (NORMAL, USER_DEFINED, UNUSED)
            or not 1 < len(text) <= MAX_MERGED_CHARS
        ):
            continue
        for split in range(1, len(text)):
            if text[:split] in ids and text[split:] in ids:
                yield (piece.score, split), text[:split], text[split:]


def build_unigram(pieces: Mapping[int, tuple[str, float]], unknown: int) -> Json:
    """Return a Unigram model of these pieces (row -> text, score) except the unknown token.

    Ids differ from rows; pieces are identified by their text.
    """
    vocab: list[list[str | float]] = [
        [text, score] for row, (text, score) in pieces.items() if row != unknown
    ]
    return {
        "type": "Unigram",
        "unk_id": len(vocab),
        "byte_fallback": False,
        "vocab": [*vocab, [HIDDEN_UNKNOWN, 0.0]],
    }
