"""A model's pieces as a tokenizer.json: what the tokenizers library is given to run beside
llama.cpp.

For a SentencePiece model of its own (BPE by merges derived from scores, as transformers converts
it), and for Unigram models, whose unknown and control pieces the library would find in a text. It
knows JSON, not the library.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quant.rows import Added
from quant.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Piece

LONGEST = 256  # characters of a piece that merges are looked for in
HIDDEN = "\0"  # the unknown token's text, which is in no test string
Json = dict[str, Any]


def tokenizer(model: Json, added: Mapping[int, Added]) -> Json:
    """A tokenizer.json that does nothing to a text but find added tokens."""
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    listed = [
        {"id": index, "content": token.text} | {name: getattr(token, name) for name in flags}
        for index, token in sorted(added.items())
        if token.text
    ]
    return {
        "version": "1.0",
        "added_tokens": listed,
        "normalizer": None,
        "pre_tokenizer": None,
        "model": model,
    }


def named(pieces: Mapping[int, Piece]) -> dict[int, Added]:
    """The pieces that are found in a text as they stand, before it is split."""
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    return {
        index: Added(piece.text, special=piece.type != USER_DEFINED)
        for index, piece in pieces.items()
        if piece.type in kinds
    }


def bpe(pieces: Mapping[int, Piece]) -> Json:
    """SentencePiece's BPE: the pair that makes the piece of the highest score is joined first."""
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
    pieces: Iterable[Piece], ids: Mapping[str, int]
) -> Iterator[tuple[tuple[float, int], str, str]]:
    for piece in pieces:
        text = piece.text
        if piece.type not in (NORMAL, USER_DEFINED, UNUSED) or not 1 < len(text) <= LONGEST:
            continue
        for at in range(1, len(text)):
            if text[:at] in ids and text[at:] in ids:
                yield (piece.score, at), text[:at], text[at:]


def unigram(pieces: Mapping[int, tuple[str, float]], unknown: int) -> Json:
    """A Unigram of these pieces by row, the unknown token aside; rows are told apart by text."""
    listed: list[list[str | float]] = [
        [text, score] for row, (text, score) in pieces.items() if row != unknown
    ]
    return {
        "type": "Unigram",
        "unk_id": len(listed),
        "byte_fallback": False,
        "vocab": [*listed, [HIDDEN, 0.0]],
    }
