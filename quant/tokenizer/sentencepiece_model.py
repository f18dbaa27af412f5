"""Reads the pieces and settings of a SentencePiece model file (tokenizer.model) with a minimal
protobuf reader.

Few fields are needed (sentencepiece_model.proto: ModelProto, SentencePiece, TrainerSpec,
NormalizerSpec), so that a dependency on the sentencepiece package is not justified.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quant.errors import UserError

# Types of pieces; the numbers are the same as those of GGUF's token types.
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
USER_DEFINED, UNUSED, BYTE = 4, 5, 6
UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
MAX_PIECES = 1 << 22  # limit of the number of pieces; sixteen times the largest known vocabulary
MAX_FILE_BYTES = 1 << 27  # limit of the file's size in bytes


@dataclass(frozen=True, slots=True)
class SentencePieceToken:
    """One piece of the vocabulary. `type` is NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or
    BYTE.
    """

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The pieces and settings of a SentencePiece model. The settings have the names and defaults of
    the protobuf messages.

    `charsmap` is precompiled_charsmap; it is empty if the model has no character rules.
    """

    pieces: tuple[SentencePieceToken, ...]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    treat_whitespace_as_suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def load_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a tokenizer.model. Raises UserError if the file is not a SentencePiece model."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("too large")
        return _parse_model(file.read_bytes())
    except (ValueError, struct.error, IndexError, TypeError):
        raise UserError(
            f"{file} is not a valid SentencePiece model", hint="fetch the file again"
        ) from None


def _parse_model(data: bytes) -> SentencePieceModel:
    """Parse a ModelProto message. Raises ValueError, struct.error, IndexError or TypeError if it is
    damaged.
    """
    pieces: list[SentencePieceToken] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_parse_piece(_as_bytes(value)))
        elif number == 2:
            trainer |= _fields(_as_bytes(value))
        elif number == 3:
            normalizer |= _fields(_as_bytes(value))
        if len(pieces) > MAX_PIECES:
            raise ValueError("too many pieces")
    if not pieces:
        raise ValueError("no pieces")
    return SentencePieceModel(
        tuple(pieces),
        model_type=_as_int(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(_as_int(trainer.get(35, 0))),
        treat_whitespace_as_suffix=bool(_as_int(trainer.get(24, 0))),
        charsmap=_as_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(_as_int(normalizer.get(3, 1))),
        remove_extra_whitespaces=bool(_as_int(normalizer.get(4, 1))),
        escape_whitespaces=bool(_as_int(normalizer.get(5, 1))),
    )


def _parse_piece(data: bytes) -> SentencePieceToken:
    """Parse a SentencePiece message. Raises ValueError for an unknown type or a score that is not
    finite.
    """
    text, score, kind = b"", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _as_bytes(value)
        elif number == 2:
            (score,) = struct.unpack("<f", _as_bytes(value))
        elif number == 3:
            kind = _as_int(value)
    if not NORMAL <= kind <= BYTE or not math.isfinite(score):
        raise ValueError(kind, score)
    return SentencePieceToken(text.decode(), score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) for each field of a protobuf message: a varint as int, all other
    values as bytes.
    """
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _read_varint(data, position)
            yield tag >> 3, value
            continue
        if wire_type == 2:
            length, position = _read_varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + length > len(data):
            raise ValueError("cut short")
        yield tag >> 3, data[position : position + length]
        position += length


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Read the varint at byte `position`. Return its value and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("a number without an end")


def _as_bytes(value: int | bytes) -> bytes:
    """Return the value. Raises ValueError if it is not bytes."""
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _as_int(value: int | bytes) -> int:
    """Return the value. Raises ValueError if it is not an int."""
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value
