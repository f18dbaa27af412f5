"""A SentencePiece model file, tokenizer.model: its pieces and its settings, by a minimal protobuf
reader.

The sentencepiece package would be a dependency for these few fields (sentencepiece_model.proto:
ModelProto, SentencePiece, TrainerSpec, NormalizerSpec). It knows the encoding and those fields,
nothing of GGUF.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quant.errors import Refusal

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    1,
    2,
    3,
    4,
    5,
    6,
)  # the same numbers as GGUF's token types
UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
MOST = 1 << 22  # pieces: sixteen times the largest vocabulary there is
LARGEST = 1 << 27  # bytes of a file


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece; `type` is one of the numbers above."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A model; the settings are named as in its protobuf, and default as there.

    `charsmap` (precompiled_charsmap) is empty where characters are taken as they come.
    """

    pieces: tuple[Piece, ...]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    treat_whitespace_as_suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def load(file: Path) -> SentencePiece:
    """Read a tokenizer.model; raises Refusal for anything that is not one."""
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError("too large")
        return _model(file.read_bytes())
    except (ValueError, struct.error, IndexError, TypeError):
        raise Refusal(
            f"{file} is not a sound SentencePiece model", hint="fetch the file again"
        ) from None


def _model(data: bytes) -> SentencePiece:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_blob(value)))
        elif number == 2:
            trainer |= _fields(_blob(value))
        elif number == 3:
            normalizer |= _fields(_blob(value))
        if len(pieces) > MOST:
            raise ValueError("too many pieces")
    if not pieces:
        raise ValueError("no pieces")
    return SentencePiece(
        tuple(pieces),
        model_type=_int(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(_int(trainer.get(35, 0))),
        treat_whitespace_as_suffix=bool(_int(trainer.get(24, 0))),
        charsmap=_blob(normalizer.get(2, b"")),
        add_dummy_prefix=bool(_int(normalizer.get(3, 1))),
        remove_extra_whitespaces=bool(_int(normalizer.get(4, 1))),
        escape_whitespaces=bool(_int(normalizer.get(5, 1))),
    )


def _piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _blob(value)
        elif number == 2:
            (score,) = struct.unpack("<f", _blob(value))
        elif number == 3:
            kind = _int(value)
    if not NORMAL <= kind <= BYTE or not math.isfinite(score):
        raise ValueError(kind, score)
    return Piece(text.decode(), score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: a varint as int, everything else as its bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError("cut short")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number without an end")


def _blob(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value
