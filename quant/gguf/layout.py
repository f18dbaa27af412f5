"""Lays out a GGUF file: computes the bytes of its header and the position of every tensor, before
the first tensor is read.

gguf.GGUFWriter is not used for two reasons. Values that are copied from another file must keep
their bytes, but the package decodes and encodes every string and cannot write empty or invalid
ones. And the header's size must be known before the first tensor is written.
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
    """The position of a tensor in the new file. `shape` is in ggml's order (row length first);
    `offset` is from the start of the file, in bytes.
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
        """Return whether the first `position` bytes of the file are the whole header and complete
        rows of tensors, so that writing can continue there.
        """
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
    """Return a metadata value as a GGUF file stores it: its type number, then the value.

    `kind` is a GGUF type ("uint32"), or "array:" and the type of the elements ("array:int32").
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
    """Lay out a file. All sizes follow from shapes and types, so that no tensor is read.

    `entries` are (key, stored type number and value); `tensors` are (name, shape in ggml's order,
    type). `alignment` is in bytes.
    """
    tensors = list(tensors)
    header_parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(entries))]
    header_parts += [_encode("string", key) + blob for key, blob in entries]
    relative, slots = 0, []
    for name, shape, kind in tensors:
        header_parts.append(
            _encode("string", name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        )
        header_parts.append(struct.pack("<IQ", ggml.TYPE_NUMBERS[kind], relative))
        nbytes = _nbytes(shape, kind)
        slots.append((name, shape, kind, relative, nbytes))
        relative += _padded(nbytes, alignment)
    header = b"".join(header_parts)
    header += bytes(_padded(len(header), alignment) - len(header))
    data_offset = len(header)
    file_slots = tuple(
        TensorSlot(name, shape, kind, data_offset + offset, size)
        for name, shape, kind, offset, size in slots
    )
    return FileLayout(header, file_slots, data_offset + relative)


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of a tensor without padding."""
    rows = 1
    for size in shape[1:]:
        rows *= size
    return rows * ggml.row_bytes(kind, shape[0])


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
