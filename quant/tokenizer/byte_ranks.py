"""Converts a byte-level BPE that has a rank for each piece of bytes, but no merges, to the content
of a tokenizer.json. tiktoken and Tekken store such vocabularies.

tiktoken joins the two neighbors that make the piece with the lowest rank, and does not split a word
that is a piece. The merges that do the same are all pairs of pieces that make a piece, in the order
of that piece's rank (TikTokenConverter of transformers).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quant.errors import UserError
from quant.tokenizer.pre_tokenizer import build_node
from quant.tokenizer.sentencepiece_model import MAX_PIECES

MAX_PIECE_BYTES = 1024
Json = dict[str, Any]
# The characters that stand for bytes in byte-level vocabularies: printable bytes stand for
# themselves, all others get characters from U+0100 on.
PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHAR_BY_BYTE = {byte: chr(byte) for byte in PRINTABLE_BYTES} | {
    byte: chr(256 + index)
    for index, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE_BYTES)
}
BYTE_BY_CHAR = {char: byte for byte, char in CHAR_BY_BYTE.items()}


def spell_bytes(piece: bytes) -> str:
    """Return a piece in the characters that stand for its bytes."""
    return "".join(CHAR_BY_BYTE[byte] for byte in piece)


def check_pieces(pieces: Sequence[bytes], location: str) -> None:
    """Raise UserError, which names `location`, unless the pieces are distinct, not empty, of usual
    length, and contain every byte.
    """
    problem = ""
    if len(pieces) > MAX_PIECES:
        problem = f"has {len(pieces):,} pieces; the limit is {MAX_PIECES:,}"
    elif not all(0 < len(piece) <= MAX_PIECE_BYTES for piece in pieces):
        problem = f"has pieces that are empty or longer than {MAX_PIECE_BYTES:,} bytes"
    elif len(set(pieces)) < len(pieces):
        problem = "has the same piece twice"
    elif not {bytes([byte]) for byte in range(256)} <= set(pieces):
        problem = "does not have a piece for every byte"
    if problem:
        raise make_damage_error(location, problem)


def make_damage_error(location: str, problem: str) -> UserError:
    """Return the error that the file `location` is damaged. `problem` says what is wrong."""
    return UserError(f"{location} {problem}", hint="fetch the file again")


def find_merges(pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of pieces that make a piece, by the rank of that piece, then by the ranks of
    the pair. `pieces` are in the order of their ranks.
    """
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges: list[tuple[bytes, bytes]] = []
    for piece in pieces:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def build_tokenizer_json(
    pieces: Sequence[bytes],
    first_row: int,
    special: Mapping[int, str],
    pattern: str,
    post_processor: Json | None = None,
) -> Json:
    """Return the content of a tokenizer.json. The piece of rank 0 is in row `first_row`; `special`
    are the texts of special tokens by row; `pattern` is the expression that splits text into words.
    """
    rows = {text: row for row, text in special.items()}
    rows |= {spell_bytes(piece): first_row + rank for rank, piece in enumerate(pieces)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": row, "content": text, **flags, "special": True}
            for row, text in sorted(special.items())
        ],
        "normalizer": None,
        "pre_tokenizer": build_node((pattern,)),
        "post_processor": post_processor,
        "decoder": None,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": rows,
            "merges": [
                [spell_bytes(left), spell_bytes(right)] for left, right in find_merges(pieces)
            ],
        },
    }
