"""Reads tiktoken.model. Each line has a piece of bytes in base64 and its rank, which is its row.

The special tokens are in tokenizer_config.json. The expression that splits text is part of the
model's code, which is not run: PATTERNS has the expression by the name of the tokenizer's class.
Follows set_vocab of DeepseekV2Model of llama.cpp (conversion/deepseek.py) for Kimi K2.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.errors import UserError
from quant.tokenizer import byte_ranks
from quant.tokenizer.pre_tokenizer import KIMI

FILE = "tiktoken.model"
MAX_FILE_BYTES = 1 << 26
# tokenizer_class in tokenizer_config.json -> the expression of its code.
PATTERNS = {"TikTokenTokenizer": KIMI}
Json = Mapping[str, Any]


def read_tiktoken(file: Path, settings: Json) -> dict[str, Any]:
    """Return a tiktoken.model as the content of a tokenizer.json. `settings` is the content of
    tokenizer_config.json. Raises UserError if the file is damaged or the class is unknown.
    """
    kind = settings.get("tokenizer_class")
    if not isinstance(kind, str) or kind not in PATTERNS:
        raise UserError(
            f"{file} does not say how text is split, and the class {kind!s:.60} is unknown; known "
            f"is {', '.join(PATTERNS)}",
            hint="add the tokenizer.json of the model, or use a GGUF of it",
        )
    pieces = read_pieces(file)
    special: dict[int, str] = {}
    decoder = settings.get("added_tokens_decoder")
    for row, item in decoder.items() if isinstance(decoder, dict) else ():
        text = item.get("content") if isinstance(item, dict) else None
        is_row = isinstance(row, str) and row.isascii() and row.isdecimal() and len(row) < 10
        if is_row and isinstance(text, str) and text and int(row) >= len(pieces):
            special[int(row)] = text
    return byte_ranks.build_tokenizer_json(pieces, 0, special, PATTERNS[kind])


def read_pieces(file: Path) -> list[bytes]:
    """Return the pieces in the order of their ranks. Raises UserError if the file is damaged, too
    large, or does not have every rank once.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise byte_ranks.make_damage_error(
                str(file), f"is larger than {MAX_FILE_BYTES:,} bytes"
            )
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}", hint="fetch the file again") from None
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            if len(rank) > 9 or int(rank) in by_rank:
                raise ValueError
            by_rank[int(rank)] = base64.b64decode(text, validate=True)
        except ValueError:
            raise byte_ranks.make_damage_error(
                str(file), f"has no piece and rank in line {number}"
            ) from None
    if sorted(by_rank) != list(range(len(by_rank))):
        raise byte_ranks.make_damage_error(str(file), "does not have every rank once")
    pieces = [by_rank[rank] for rank in range(len(by_rank))]
    byte_ranks.check_pieces(pieces, str(file))
    return pieces
