"""Lays out a GGUF file: computes the bytes of its header and the position of every tensor, before
the first tensor is read.

gguf.GGUFWriter is not used for two reasons. Values that are copied from another file must keep
their bytes, but the package decodes and encodes every string and cannot write empty or invalid
ones. And the header's size must be known before the first tensor.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quant.gguf.header import ARRAY, MAGIC, SCALAR_CODES, STRING, TYPE_NAMES
from quant.native import ggml

TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
PlainValue = int | float | bool | str | bytes


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor's position in the new file: `shape` in ggml's order, `offset` from the start of the
    file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a whole file: the bytes of the header, the position of every tensor, and the
    final size in bytes.
    """

    header: bytes
    slots: tuple[TensorSlot, ...]
    nbytes: int

    def ends_with_row(self, position: int) -> bool:
        """Return whether the first `position` bytes of the file are the header and complete rows."""
        if not len(self.header) <= position <= self.nbytes:
            return False
        slot = next(
            (slot for slot in self.slots if slot.offset < position < slot.offset + slot.nbytes),
            None,
        )
        return (
            slot is None or (position - slot.offset) % ggml.row_bytes(slot.type, slot.shape[0]) == 0
        )


def encode_entry(kind: str, value: PlainValue | Sequence[PlainValue]) -> bytes:
    """Return a value as a GGUF file stores it, with its type word first.

    `kind` is a GGUF type; "array:int32" is an array of int32.
    """
    if kind.startswith("array:"):
        kind = kind.removeprefix("array:")
        assert isinstance(value, list | tuple), value
        return struct.pack("<IIQ", ARRAY, TYPE_NUMBERS[kind], len(value)) + b"".join(
            _encode(kind, item) for item in value
        )
    assert not isinstance(value, list | tuple), value
    return struct.pack("<I", TYPE_NUMBERS[kind]) + _encode(kind, value)  # type: ignore[arg-type]


def _encode(kind: str, value: PlainValue) -> bytes:
    if TYPE_NUMBERS[kind] == STRING:
        blob = value.encode() if isinstance(value, str) else value
        assert isinstance(blob, bytes), value
        return struct.pack("<Q", len(blob)) + blob
    return struct.pack("<" + SCALAR_CODES[TYPE_NUMBERS[kind]], value)


def lay_out_file(
    entries: Sequence[tuple[str, bytes]],
    tensors: Iterable[tuple[str, tuple[int, ...], str]],
    alignment: int,
) -> FileLayout:
    """Lay out a file. All sizes follow from shapes and types, so no tensor is read.

    `entries` are (key, type word and value as stored); `tensors` are (name, shape in ggml's order,
    type).
    """
    tensors = list(tensors)
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(entries))]
    head += [_encode("string", key) + blob for key, blob in entries]
    relative, slots = 0, []
    for name, shape, kind in tensors:
        head.append(_encode("string", name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        head.append(struct.pack("<IQ", ggml.TYPE_NUMBERS[kind], relative))
        nbytes = _nbytes(shape, kind)
        slots.append((name, shape, kind, relative, nbytes))
        relative += _padded(nbytes, alignment)
    header = b"".join(head)
    header += bytes(_padded(len(header), alignment) - len(header))
    start = len(header)
    placed = tuple(
        TensorSlot(name, shape, kind, start + offset, size)
        for name, shape, kind, offset, size in slots
    )
    return FileLayout(header, placed, start + relative)


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    rows = 1
    for size in shape[1:]:
        rows *= size
    return rows * ggml.row_bytes(kind, shape[0])


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
