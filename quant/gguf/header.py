"""Reads the header of one GGUF file: its metadata and its tensor table. Every count, length and
offset is checked against the file's size before it is used, because the file is untrusted.

gguf.GGUFReader is not used: it trusts its input, and it makes a numpy view of every element of
every array, which takes seconds for a large vocabulary. Here arrays stay in the file until they are
read. A file that llama.cpp refuses (gguf_init_from_reader in ggml/src/gguf.cpp) is refused here,
with the reason.
"""

import errno
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quant.errors import NO_MEMORY_HINT, UserError
from quant.native import ggml

MAGIC, DEFAULT_ALIGNMENT_BYTES, MAX_DIMS, MAX_NAME_BYTES = b"GGUF", 32, 4, 63
# Limits far above any model's counts: each key or tensor takes some hundred bytes of memory.
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 17
# A hole in a file takes no disk space, so the size of the file does not limit its header. Strings
# are counted one by one, and llama.cpp copies all arrays.
MAX_STRINGS, MAX_HEADER_BYTES = 1 << 23, 1 << 28
MAX_SHOWN_CHARACTERS = 100  # of a name in an error message
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
    """A metadata array whose elements stay in the file until they are read: `count` elements of
    GGUF type `kind` ("string", "float32"), stored in `nbytes` bytes at `offset`.
    """

    file: Path
    kind: str
    count: int
    offset: int
    nbytes: int

    def head(self, count: int) -> "GgufArray":
        """Return the first `count` elements of an array of numbers as an array that is still
        unread. Callers that need only a few elements use it, because a malicious file may have a
        huge array under any key.
        """
        assert self.kind != "string"
        count = min(count, self.count)
        return replace(self, count=count, nbytes=self.nbytes // self.count * count if count else 0)

    def read_bytes(self) -> bytes:
        """Return the stored bytes of the elements. Raises UserError if the file became shorter."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            data = stream.read(self.nbytes)
        if len(data) != self.nbytes:
            raise UserError(f"{self.file} became shorter while it was read", hint=REFETCH_HINT)
        return data

    def read_strings(self) -> list[bytes]:
        """Return the elements of a string array as undecoded bytes."""
        assert self.kind == "string", self.kind
        data, position, strings = self.read_bytes(), 0, []
        read = struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            first = position + 8
            position = first + read(data, position)[0]
            strings.append(data[first:position])
        return strings

    def read_values(self) -> list[int] | list[float] | list[str]:
        """Return all elements as Python values. Invalid UTF-8 in a string becomes U+FFFD."""
        if self.kind == "string":
            return [blob.decode("utf-8", "replace") for blob in self.read_strings()]
        code = next(
            SCALAR_CODES[number] for number, name in TYPE_NAMES.items() if name == self.kind
        )
        return list(struct.unpack(f"<{self.count}{code}", self.read_bytes()))


MetadataValue = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class MetadataField:
    """One metadata key with its value. `kind` is the GGUF type of the value ("uint32", "array").

    `raw` is the range (first byte, end) of the type number and the value in the file, so that they
    can be copied unchanged.
    """

    key: str
    kind: str
    value: MetadataValue
    file: Path
    raw: tuple[int, int]

    def read_raw(self) -> bytes:
        """Return the stored bytes of the type number and the value."""
        with self.file.open("rb") as stream:
            stream.seek(self.raw[0])
            return stream.read(self.raw[1] - self.raw[0])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is in ggml's order (row length first); `offset` is
    from the start of `file`, in bytes.
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
        """The number of rows over all other axes. In a stack of experts, these are the rows of all
        experts.
        """
        return self.elements // self.shape[0]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of one GGUF file. `data_offset` is the byte at which the tensors begin;
    `alignment` is a number of bytes.
    """

    file: Path
    version: int
    fields: tuple[MetadataField, ...]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    alignment: int


def read_file_header(file: Path) -> FileHeader:
    """Read the header of one GGUF file. Raises UserError, with the file's name, if the file cannot
    be read or is not valid.
    """
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
        has_no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
        raise UserError(
            f"{file} cannot be read: {error}",
            hint=NO_MEMORY_HINT if has_no_memory else "check the path and its permissions",
        ) from None


class _Reader:
    """A parser of the mapped file. `position` is the byte that is read next. Reading past `size`
    raises UserError.
    """

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self.file, self.data, self.size, self.position = file, data, size, 0

    def read(self) -> FileHeader:
        version, tensor_count, key_count = self._preamble()
        fields = tuple(self._fields(key_count))
        alignment = self._alignment(fields)
        infos = list(self._tensors(tensor_count))
        start = -(-self.position // alignment) * alignment
        return FileHeader(
            self.file,
            version,
            fields,
            tuple(self._locate_tensors(infos, start, alignment)),
            start,
            alignment,
        )

    def _preamble(self) -> tuple[int, int, int]:
        """Check magic and version. Return the version, the number of tensors and the number of
        keys.
        """
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
        self.position = 4
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
        tensor_count, key_count = self._unpack("<QQ", "the counts")
        available = self.size - self.position
        if key_count > min(available // 13, MAX_KEYS):
            raise self._invalid(f"it claims {key_count} keys in {available} bytes")
        if tensor_count > min(available // 28, MAX_TENSORS):
            raise self._invalid(f"it claims {tensor_count} tensors in {available} bytes")
        return version, tensor_count, key_count

    def _fields(self, count: int) -> Iterator[MetadataField]:
        seen: set[bytes] = set()
        for index in range(count):
            blob = self._string(f"key {index}")
            if not blob or blob in seen:
                raise self._invalid(
                    f"key {index} is {'a repetition: ' + repr(blob) if blob else 'empty'}"
                )
            seen.add(blob)
            key, first = blob.decode("utf-8", "replace"), self.position
            (number,) = self._unpack("<I", key)
            value = self._value(number, key)
            if self.position > MAX_HEADER_BYTES:
                raise self._invalid(
                    f"its header ends beyond {MAX_HEADER_BYTES} bytes, after key {_shorten(key)!r}"
                )
            yield MetadataField(key, TYPE_NAMES[number], value, self.file, (first, self.position))

    def _value(self, number: int, key: str) -> MetadataValue:
        if number == STRING:
            return self._string(key).decode("utf-8", "replace")
        if number == ARRAY:
            return self._array(key)
        if number not in SCALAR_CODES:
            raise self._invalid(f"key {_shorten(key)!r} has unknown type number {number}")
        value: int | float | bool = self._unpack("<" + SCALAR_CODES[number], key)[0]
        return value

    def _array(self, key: str) -> GgufArray:
        number, count = self._unpack("<IQ", key)
        first, available = self.position, self.size - self.position
        if number == STRING:
            if count > min(available // 8, MAX_STRINGS):
                raise self._invalid(
                    f"key {_shorten(key)!r} claims {count} strings in {available} bytes"
                )
            self._skip_strings(count, key)
        elif number in SCALAR_BYTES:
            if count > available // SCALAR_BYTES[number]:
                raise self._invalid(
                    f"key {_shorten(key)!r} claims {count} elements in {available} bytes"
                )
            self.position += count * SCALAR_BYTES[number]
        else:
            raise self._invalid(
                f"key {_shorten(key)!r} is an array of unknown type number {number}"
            )
        return GgufArray(self.file, TYPE_NAMES[number], count, first, self.position - first)

    def _skip_strings(self, count: int, key: str) -> None:
        # This loop takes the largest share of the time: a large vocabulary has half a million
        # strings. unpack_from raises an error instead of reading past the end.
        """Move past the strings of an array. Raises UserError if they do not end within the
        file.
        """
        position, data, read = self.position, self.data, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                position += 8 + read(data, position)[0]
        except (struct.error, OverflowError):
            raise self._invalid(
                f"a string of key {_shorten(key)!r} ends beyond the end of the file"
            ) from None
        if position > self.size:
            raise self._invalid(
                f"a string of key {_shorten(key)!r} ends beyond the end of the file"
            )
        self.position = position

    def _alignment(self, fields: tuple[MetadataField, ...]) -> int:
        """Return the file's alignment in bytes, from its metadata or the default."""
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
        """Yield (name, shape, type, offset from the first tensor) of each entry of the tensor
        table.
        """
        seen: set[bytes] = set()
        for index in range(count):
            blob = self._string(f"the name of tensor {index}")
            name = blob.decode("utf-8", "replace")
            if not blob or len(blob) > MAX_NAME_BYTES:
                raise self._invalid(
                    f"the name of tensor {index} has {len(blob)} bytes; "
                    f"1 to {MAX_NAME_BYTES} are allowed"
                )
            if blob in seen:
                raise self._invalid(f"it has tensor {_shorten(name)} twice")
            seen.add(blob)
            (dims,) = self._unpack("<I", name)
            if not 1 <= dims <= MAX_DIMS:
                raise self._invalid(
                    f"tensor {_shorten(name)} has {dims} dimensions; 1 to {MAX_DIMS} are allowed"
                )
            shape = self._unpack(f"<{dims}Q", name)
            if 0 in shape or _product(shape) > 1 << 62:
                raise self._invalid(
                    f"tensor {_shorten(name)} has the impossible shape {list(shape)}"
                )
            number, offset = self._unpack("<IQ", name)
            if number not in ggml.TYPE_NAMES:
                raise self._invalid(
                    f"tensor {_shorten(name)} has unknown type number {number}",
                    "if the file is newer than this program, update llama-cpp-python",
                )
            yield name, shape, ggml.TYPE_NAMES[number], offset

    def _locate_tensors(
        self, infos: list[tuple[str, tuple[int, ...], str, int]], start: int, alignment: int
    ) -> Iterator[TensorInfo]:
        """Yield each tensor with its offset from the start of the file. Raises UserError unless
        tensors follow one another with only padding between them.
        """
        expected = 0
        for name, shape, kind, offset in infos:
            block = ggml.block_size(kind)
            if shape[0] % block.values:
                raise self._invalid(
                    f"tensor {_shorten(name)} has rows of {shape[0]} values; {kind} needs a multiple of "
                    f"{block.values}"
                )
            nbytes = _product(shape) // block.values * block.nbytes
            if offset != expected:
                raise self._invalid(
                    f"tensor {_shorten(name)} is at offset {offset}, not at {expected}"
                )
            if start + offset + nbytes > self.size:
                raise UserError(
                    f"{self.file} is truncated: tensor {_shorten(name)} ends at byte "
                    f"{start + offset + nbytes}, the file has {self.size}",
                    hint=REFETCH_HINT,
                )
            yield TensorInfo(name, shape, kind, start + offset, nbytes, self.file)
            expected += -(-nbytes // alignment) * alignment

    def _string(self, label: str) -> bytes:
        (length,) = self._unpack("<Q", label)
        if length > self.size - self.position:
            raise self._invalid(
                f"{label} claims {length} bytes, {self.size - self.position} are left"
            )
        self.position += length
        return self.data[self.position - length : self.position]

    def _unpack(self, code: str, label: str) -> tuple[int, ...]:
        """Read numbers with a format of `struct`. `label` says what they are, for the error."""
        if self.position + struct.calcsize(code) > self.size:
            raise UserError(f"{self.file} is truncated: it ends within {label}", hint=REFETCH_HINT)
        values = struct.unpack_from(code, self.data, self.position)
        self.position += struct.calcsize(code)
        return values

    def _invalid(self, why: str, hint: str = REFETCH_HINT) -> UserError:
        return UserError(f"{self.file} is not a valid GGUF file: {why}", hint=hint)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _shorten(name: str) -> str:
    """Return the beginning of a name for a message. A damaged length makes a name of a whole file."""
    return name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}…"
