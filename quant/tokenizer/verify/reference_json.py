"""Builds a tokenizer.json from a model's pieces, so that the tokenizers library can run it as the
reference for llama.cpp.

It is used in two cases. SentencePiece BPE models have no tokenizer.json; their merges are derived
from scores as transformers does. Unigram models have one, but with it the library would match
unknown and control pieces in a text.
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

MAX_MERGED_CHARS = 256  # longer pieces get no merges
HIDDEN_UNKNOWN = "\0"  # the text of the unknown token, which no probe string contains
Json = dict[str, Any]


def build_tokenizer_json(model: Json, added: Mapping[int, AddedToken]) -> Json:
    """Return a tokenizer.json with the given "model" and added tokens (by row), without a
    normalizer and without a pre-tokenizer.
    """
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
    """Return the pieces that are matched in a text before it is split, by row: unknown, control and
    user-defined pieces.
    """
    matched_types = (UNKNOWN, CONTROL, USER_DEFINED)
    return {
        index: AddedToken(piece.text, special=piece.type != USER_DEFINED)
        for index, piece in pieces.items()
        if piece.type in matched_types
    }


def build_bpe(pieces: Mapping[int, SentencePieceToken]) -> Json:
    """Return the "model" of a tokenizer.json for SentencePiece's BPE, given its pieces by row. The
    first merge is that of the pair that makes the piece with the highest score.
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
    """Yield (sort key, left text, right text) for every pair of pieces that makes a piece."""
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
    """Return the "model" of a tokenizer.json for a Unigram of these pieces (row -> text, score),
    without the unknown token, whose row is `unknown`.

    Ids in the result differ from rows; pieces are identified by their texts.
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
