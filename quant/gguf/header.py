"""Reads the header of one GGUF file. Every count, length and offset is first checked against the
file's size.

gguf.GGUFReader is not used, because it trusts its input and makes a numpy view of every element of
every array, which takes seconds for a large vocabulary. Here arrays stay in the file until they are
read. Follows gguf_init_from_reader (ggml/src/gguf.cpp): a file that it refuses is refused here,
with the reason.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quant.errors import UserError
from quant.native import ggml

MAGIC, DEFAULT_ALIGNMENT_BYTES, MAX_DIMS, MAX_NAME_BYTES = b"GGUF", 32, 4, 63
# Far more than any model has; each key or tensor takes some hundred bytes of memory.
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 20
STRING, ARRAY, BOOL = 8, 9, 7
SCALAR_CODES = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
SCALAR_BYTES = {number: struct.calcsize("<" + code) for number, code in SCALAR_CODES.items()}
TYPE_NAMES = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    8: "string",
    9: "array",
    10: "uint64",
    11: "int64",
    12: "float64",
}
REFETCH_HINT = "fetch or convert the file again"


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array that stays in the file: `count` elements of GGUF type `kind`, in `nbytes` bytes at
    `offset`.
    """

    file: Path
    kind: str
    count: int
    offset: int
    nbytes: int

    def head(self, count: int) -> "GgufArray":
        """Return the first `count` elements of an array of numbers. A malicious file may have a
        huge array under any key.
        """
        assert self.kind != "string"
        count = min(count, self.count)
        return replace(self, count=count, nbytes=self.nbytes // self.count * count if count else 0)

    def read_bytes(self) -> bytes:
        """Return the stored bytes of the elements."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            data = stream.read(self.nbytes)
        if len(data) != self.nbytes:
            raise UserError(f"{self.file} became shorter while it was read", hint=REFETCH_HINT)
        return data

    def read_strings(self) -> list[bytes]:
        """Return the elements of a string array as bytes, not decoded."""
        assert self.kind == "string", self.kind
        data, at, out = self.read_bytes(), 0, []
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", data, at)
            out.append(data[at + 8 : at + 8 + length])
            at += 8 + length
        return out

    def read_values(self) -> list[int] | list[float] | list[str]:
        """Return all elements; invalid UTF-8 in a string becomes U+FFFD."""
        if self.kind == "string":
            return [blob.decode("utf-8", "replace") for blob in self.read_strings()]
        code = next(
            SCALAR_CODES[number] for number, name in TYPE_NAMES.items() if name == self.kind
        )
        return list(struct.unpack(f"<{self.count}{code}", self.read_bytes()))


MetadataValue = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class MetadataField:
    """One key and its value; `kind` is the GGUF type of the value.

    `raw` is the range in the file (first byte, end) of its type word and value, so that they can be
    copied unchanged.
    """

    key: str
    kind: str
    value: MetadataValue
    file: Path
    raw: tuple[int, int]

    def read_raw(self) -> bytes:
        """Return the type word and the value as they are stored."""
        with self.file.open("rb") as stream:
            stream.seek(self.raw[0])
            return stream.read(self.raw[1] - self.raw[0])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in ggml's order (row length first), and `offset` from the start of
    `file`.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    file: Path

    @property
    def elements(self) -> int:
        """The number of values."""
        return _product(self.shape)

    @property
    def columns(self) -> int:
        """The number of values in a row."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """The number of rows over all further axes; in a stack of experts, the rows of all experts."""
        return self.elements // self.shape[0]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of one GGUF file."""

    file: Path
    version: int
    fields: tuple[MetadataField, ...]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    alignment: int


def read_file_header(file: Path) -> FileHeader:
    """Read the header of one GGUF file. Raises UserError, with its name, if it is not valid."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            if size < 24:
                raise UserError(
                    f"{file} is not a GGUF file: it has {size} bytes", hint=REFETCH_HINT
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data, size).read()
    except FileNotFoundError:
        raise UserError(f"there is no file {file}", hint="check the path") from None
    except IsADirectoryError:
        raise UserError(
            f"{file} is a folder, not a GGUF file", hint="name a .gguf file in it"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read: {error}", hint="check the path and its permissions"
        ) from None


class _Reader:
    """A cursor over the mapped file. Reading past `size` raises UserError."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self.file, self.data, self.size, self.at = file, data, size, 0

    def read(self) -> FileHeader:
        version, tensors, keys = self._preamble()
        fields = tuple(self._fields(keys))
        alignment = self._alignment(fields)
        infos = list(self._tensors(tensors))
        start = -(-self.at // alignment) * alignment
        return FileHeader(
            self.file,
            version,
            fields,
            tuple(self._locate(infos, start, alignment)),
            start,
            alignment,
        )

    def _preamble(self) -> tuple[int, int, int]:
        magic = self.data[:4]
        if magic != MAGIC:
            if magic == MAGIC[::-1]:
                raise self._invalid(
                    "its byte order is reversed (big-endian)",
                    "convert it for a little-endian machine",
                )
            raise UserError(
                f"{self.file} is not a GGUF file: it begins with {magic!r}",
                hint="name a .gguf file",
            )
        self.at = 4
        (version,) = self._unpack("<I", "the version")
        if version and not version & 0xFFFF:
            raise self._invalid(
                "its byte order is reversed (big-endian)",
                "convert it for a little-endian machine",
            )
        if version not in (2, 3):
            raise self._invalid(
                f"its GGUF version is {version}; versions 2 and 3 are supported",
                "convert the model again",
            )
        tensors, keys = self._unpack("<QQ", "the counts")
        available = self.size - self.at
        if keys > min(available // 13, MAX_KEYS):
            raise self._invalid(f"it claims {keys} keys in {available} bytes")
        if tensors > min(available // 28, MAX_TENSORS):
            raise self._invalid(f"it claims {tensors} tensors in {available} bytes")
        return version, tensors, keys

    def _fields(self, count: int) -> Iterator[MetadataField]:
        seen: set[bytes] = set()
        for index in range(count):
            blob = self._string(f"key {index}")
            if not blob or blob in seen:
                raise self._invalid(
                    f"key {index} is {'a repetition: ' + repr(blob) if blob else 'empty'}"
                )
            seen.add(blob)
            key, first = blob.decode("utf-8", "replace"), self.at
            (number,) = self._unpack("<I", key)
            value = self._value(number, key)
            yield MetadataField(key, TYPE_NAMES[number], value, self.file, (first, self.at))

    def _value(self, number: int, key: str) -> MetadataValue:
        if number == STRING:
            return self._string(key).decode("utf-8", "replace")
        if number == ARRAY:
            return self._array(key)
        if number not in SCALAR_CODES:
            raise self._invalid(f"key {key!r} has unknown type number {number}")
        value: int | float | bool = self._unpack("<" + SCALAR_CODES[number], key)[0]
        return value

    def _array(self, key: str) -> GgufArray:
        number, count = self._unpack("<IQ", key)
        first, available = self.at, self.size - self.at
        if number == STRING:
            if count > available // 8:
                raise self._invalid(f"key {key!r} claims {count} strings in {available} bytes")
            self._skip_strings(count, key)
        elif number in SCALAR_BYTES:
            if count > available // SCALAR_BYTES[number]:
                raise self._invalid(f"key {key!r} claims {count} elements in {available} bytes")
            self.at += count * SCALAR_BYTES[number]
        else:
            raise self._invalid(f"key {key!r} is an array of unknown type number {number}")
        return GgufArray(self.file, TYPE_NAMES[number], count, first, self.at - first)

    def _skip_strings(self, count: int, key: str) -> None:
        # This loop takes most of the time: large vocabularies have half a million strings.
        # unpack_from never reads past the end.
        at, data, read = self.at, self.data, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + read(data, at)[0]
        except (struct.error, OverflowError):
            raise self._invalid(
                f"a string of key {key!r} ends beyond the end of the file"
            ) from None
        if at > self.size:
            raise self._invalid(f"a string of key {key!r} ends beyond the end of the file")
        self.at = at

    def _alignment(self, fields: tuple[MetadataField, ...]) -> int:
        for field in fields:
            if field.key == "general.alignment":
                value = field.value
                if (
                    field.kind != "uint32"
                    or not isinstance(value, int)
                    or value < 8
                    or value & (value - 1)
                    or value > 1 << 20
                ):
                    raise self._invalid(
                        f"its alignment {value!r} ({field.kind}) is not a power of two "
                        "between 8 and 2^20"
                    )
                return value
        return DEFAULT_ALIGNMENT_BYTES

    def _tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
        seen: set[bytes] = set()
        for index in range(count):
            blob = self._string(f"the name of tensor {index}")
            name = blob.decode("utf-8", "replace")
            if not blob or len(blob) > MAX_NAME_BYTES:
                raise self._invalid(
                    f"the name of tensor {index} has {len(blob)} bytes; 1 to {MAX_NAME_BYTES} are allowed"
                )
            if blob in seen:
                raise self._invalid(f"it has tensor {name} twice")
            seen.add(blob)
            (dims,) = self._unpack("<I", name)
            if not 1 <= dims <= MAX_DIMS:
                raise self._invalid(
                    f"tensor {name} has {dims} dimensions; 1 to {MAX_DIMS} are allowed"
                )
            shape = self._unpack(f"<{dims}Q", name)
            if 0 in shape or _product(shape) > 1 << 62:
                raise self._invalid(f"tensor {name} has the impossible shape {list(shape)}")
            number, offset = self._unpack("<IQ", name)
            if number not in ggml.TYPE_NAMES:
                raise self._invalid(
                    f"tensor {name} has unknown type number {number}",
                    "if the file is newer than this program, update llama-cpp-python",
                )
            yield name, shape, ggml.TYPE_NAMES[number], offset

    def _locate(
        self, infos: list[tuple[str, tuple[int, ...], str, int]], start: int, alignment: int
    ) -> Iterator[TensorInfo]:
        expected = 0
        for name, shape, kind, offset in infos:
            block = ggml.block_size(kind)
            if shape[0] % block.values:
                raise self._invalid(
                    f"tensor {name} has rows of {shape[0]} values; {kind} needs a multiple of "
                    f"{block.values}"
                )
            nbytes = _product(shape) // block.values * block.nbytes
            if offset != expected:
                raise self._invalid(f"tensor {name} is at offset {offset}, not at {expected}")
            if start + offset + nbytes > self.size:
                raise UserError(
                    f"{self.file} is truncated: tensor {name} ends at byte "
                    f"{start + offset + nbytes}, the file has {self.size}",
                    hint=REFETCH_HINT,
                )
            yield TensorInfo(name, shape, kind, start + offset, nbytes, self.file)
            expected += -(-nbytes // alignment) * alignment

    def _string(self, label: str) -> bytes:
        (length,) = self._unpack("<Q", label)
        if length > self.size - self.at:
            raise self._invalid(f"{label} claims {length} bytes, {self.size - self.at} are left")
        self.at += length
        return self.data[self.at - length : self.at]

    def _unpack(self, code: str, label: str) -> tuple[int, ...]:
        if self.at + struct.calcsize(code) > self.size:
            raise UserError(f"{self.file} is truncated: it ends within {label}", hint=REFETCH_HINT)
        values = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return values

    def _invalid(self, why: str, hint: str = REFETCH_HINT) -> UserError:
        return UserError(f"{self.file} is not a valid GGUF file: {why}", hint=hint)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
