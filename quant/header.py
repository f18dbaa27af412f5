"""One GGUF file's header, read with every count, length and offset held against the file's size
first.

A reader of our own because gguf.GGUFReader trusts its input and makes a numpy view of every element
of every array: SmolLM2's header takes it 2.6 s and Gemma's 12.5 s, this one 0.011 and 0.027 s (2
cores, Zen 3). Arrays stay where they are until somebody asks. Follows gguf_init_from_reader
(ggml/src/gguf.cpp), refuses all it refuses, and says why. It knows the container, not what the keys
mean.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quant import native
from quant.errors import Refusal

MAGIC, ALIGNMENT, MAX_DIMS, MAX_NAME = b"GGUF", 32, 4, 63
MAX_KEYS, MAX_TENSORS = (
    1 << 16,
    1 << 20,
)  # far beyond any model: each becomes some hundred bytes here
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
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
SIZES = {number: struct.calcsize("<" + code) for number, code in SCALARS.items()}
KINDS = {
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
AGAIN = "fetch or convert the file again"


@dataclass(frozen=True, slots=True)
class Array:
    """An array that stays in the file: `count` elements of GGUF type `kind`, `nbytes` from `offset`
    on.
    """

    file: Path
    kind: str
    count: int
    offset: int
    nbytes: int

    def head(self, count: int) -> "Array":
        """The first `count` of its numbers: what a strange file calls a number may fill it."""
        assert self.kind != "string"
        count = min(count, self.count)
        return replace(self, count=count, nbytes=self.nbytes // self.count * count if count else 0)

    def raw(self) -> bytes:
        """The stored bytes of the elements."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            data = stream.read(self.nbytes)
        if len(data) != self.nbytes:
            raise Refusal(f"{self.file} has become shorter while it was read", hint=AGAIN)
        return data

    def blobs(self) -> list[bytes]:
        """The elements of a string array, undecoded."""
        assert self.kind == "string", self.kind
        data, at, out = self.raw(), 0, []
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", data, at)
            out.append(data[at + 8 : at + 8 + length])
            at += 8 + length
        return out

    def values(self) -> list[int] | list[float] | list[str]:
        """All elements; invalid UTF-8 in a string becomes U+FFFD."""
        if self.kind == "string":
            return [blob.decode("utf-8", "replace") for blob in self.blobs()]
        code = next(SCALARS[number] for number, name in KINDS.items() if name == self.kind)
        return list(struct.unpack(f"<{self.count}{code}", self.raw()))


Value = int | float | bool | str | Array


@dataclass(frozen=True, slots=True)
class Field:
    """One key and its value; `kind` is its GGUF type, `raw` where its type word and value stand."""

    key: str
    kind: str
    value: Value
    file: Path
    raw: tuple[
        int, int
    ]  # first byte, past the last: type word included, so that it can be copied as it is

    def copy(self) -> bytes:
        """The type word and the value as they are stored."""
        with self.file.open("rb") as stream:
            stream.seek(self.raw[0])
            return stream.read(self.raw[1] - self.raw[0])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in ggml's order (row length first), `offset` from the start of `file`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    file: Path

    @property
    def elements(self) -> int:
        """Number of values."""
        return _product(self.shape)

    @property
    def columns(self) -> int:
        """Values in a row."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows, experts' rows one after another."""
        return self.elements // self.shape[0]


@dataclass(frozen=True, slots=True)
class Part:
    """What one file holds."""

    file: Path
    version: int
    fields: tuple[Field, ...]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    alignment: int


def parse(file: Path) -> Part:
    """Read one file's header; anything that cannot be right is a Refusal naming the file."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            if size < 24:
                raise Refusal(f"{file} is not a GGUF file: it has {size} bytes", hint=AGAIN)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data, size).part()
    except FileNotFoundError:
        raise Refusal(f"there is no file {file}", hint="check the path") from None
    except IsADirectoryError:
        raise Refusal(
            f"{file} is a folder, not a GGUF file", hint="name a .gguf file in it"
        ) from None
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{file} cannot be read: {error}", hint="check the path and its permissions"
        ) from None


class _Reader:
    """A cursor over the mapped file; `at` never passes `size` without a Refusal."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self.file, self.data, self.size, self.at = file, data, size, 0

    def part(self) -> Part:
        version, tensors, keys = self._preamble()
        fields = tuple(self._fields(keys))
        alignment = self._alignment(fields)
        infos = list(self._tensors(tensors))
        start = -(-self.at // alignment) * alignment
        return Part(
            self.file,
            version,
            fields,
            tuple(self._place(infos, start, alignment)),
            start,
            alignment,
        )

    def _preamble(self) -> tuple[int, int, int]:
        magic = self.data[:4]
        if magic != MAGIC:
            if magic == MAGIC[::-1]:
                raise self._bad(
                    "its byte order is reversed (a big-endian file)",
                    "convert it for a little-endian machine",
                )
            raise Refusal(
                f"{self.file} is not a GGUF file: it begins with {magic!r}",
                hint="name a .gguf file",
            )
        self.at = 4
        (version,) = self._unpack("<I", "the version")
        if version and not version & 0xFFFF:
            raise self._bad(
                "its byte order is reversed (a big-endian file)",
                "convert it for a little-endian machine",
            )
        if version not in (2, 3):
            raise self._bad(
                f"its GGUF version is {version}; versions 2 and 3 are read",
                "convert the model again",
            )
        tensors, keys = self._unpack("<QQ", "the counts")
        left = self.size - self.at
        if keys > min(left // 13, MAX_KEYS):
            raise self._bad(f"it claims {keys} keys in {left} bytes")
        if tensors > min(left // 28, MAX_TENSORS):
            raise self._bad(f"it claims {tensors} tensors in {left} bytes")
        return version, tensors, keys

    def _fields(self, count: int) -> Iterator[Field]:
        seen: set[bytes] = set()
        for index in range(count):
            blob = self._string(f"key {index}")
            if not blob or blob in seen:
                raise self._bad(
                    f"key {index} is {'there twice: ' + repr(blob) if blob else 'empty'}"
                )
            seen.add(blob)
            key, first = blob.decode("utf-8", "replace"), self.at
            (number,) = self._unpack("<I", key)
            value = self._value(number, key)
            yield Field(key, KINDS[number], value, self.file, (first, self.at))

    def _value(self, number: int, key: str) -> Value:
        if number == STRING:
            return self._string(key).decode("utf-8", "replace")
        if number == ARRAY:
            return self._array(key)
        if number not in SCALARS:
            raise self._bad(f"key {key!r} has the unknown type number {number}")
        value: int | float | bool = self._unpack("<" + SCALARS[number], key)[0]
        return value

    def _array(self, key: str) -> Array:
        number, count = self._unpack("<IQ", key)
        first, left = self.at, self.size - self.at
        if number == STRING:
            if count > left // 8:
                raise self._bad(f"key {key!r} claims {count} strings in {left} bytes")
            self._skip_strings(count, key)
        elif number in SIZES:
            if count > left // SIZES[number]:
                raise self._bad(f"key {key!r} claims {count} elements in {left} bytes")
            self.at += count * SIZES[number]
        else:
            raise self._bad(f"key {key!r} is an array of the unknown type number {number}")
        return Array(self.file, KINDS[number], count, first, self.at - first)

    def _skip_strings(self, count: int, key: str) -> None:
        # The hot loop: half a million strings in a large vocabulary; unpack_from never reads past
        # the end.
        at, data, read = self.at, self.data, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + read(data, at)[0]
        except (struct.error, OverflowError):
            raise self._bad(f"a string of key {key!r} ends behind the end of the file") from None
        if at > self.size:
            raise self._bad(f"a string of key {key!r} ends behind the end of the file")
        self.at = at

    def _alignment(self, fields: tuple[Field, ...]) -> int:
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
                    raise self._bad(
                        f"its alignment {value!r} ({field.kind}) is not a power of two between 8 and 2^20"
                    )
                return value
        return ALIGNMENT

    def _tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
        seen: set[bytes] = set()
        for index in range(count):
            blob = self._string(f"the name of tensor {index}")
            name = blob.decode("utf-8", "replace")
            if not blob or len(blob) > MAX_NAME:
                raise self._bad(
                    f"the name of tensor {index} has {len(blob)} bytes; 1 to {MAX_NAME} are allowed"
                )
            if blob in seen:
                raise self._bad(f"tensor {name} is there twice")
            seen.add(blob)
            (dims,) = self._unpack("<I", name)
            if not 1 <= dims <= MAX_DIMS:
                raise self._bad(f"tensor {name} has {dims} dimensions; 1 to {MAX_DIMS} are allowed")
            shape = self._unpack(f"<{dims}Q", name)
            if 0 in shape or _product(shape) > 1 << 62:
                raise self._bad(f"tensor {name} has the impossible shape {list(shape)}")
            number, offset = self._unpack("<IQ", name)
            if number not in native.TYPE_IDS:
                raise self._bad(
                    f"tensor {name} has the unknown type number {number}",
                    "if the file is newer than this program, update llama-cpp-python",
                )
            yield name, shape, native.TYPE_IDS[number], offset

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], str, int]], start: int, alignment: int
    ) -> Iterator[TensorInfo]:
        expected = 0
        for name, shape, kind, offset in infos:
            block = native.block(kind)
            if shape[0] % block.values:
                raise self._bad(
                    f"tensor {name} has rows of {shape[0]}, {kind} needs a multiple of {block.values}"
                )
            nbytes = _product(shape) // block.values * block.nbytes
            if offset != expected:
                raise self._bad(f"tensor {name} stands at offset {offset}, not at {expected}")
            if start + offset + nbytes > self.size:
                raise Refusal(
                    f"{self.file} is truncated: tensor {name} ends at byte {start + offset + nbytes}, "
                    f"the file has {self.size}",
                    hint=AGAIN,
                )
            yield TensorInfo(name, shape, kind, start + offset, nbytes, self.file)
            expected += -(-nbytes // alignment) * alignment

    def _string(self, what: str) -> bytes:
        (length,) = self._unpack("<Q", what)
        if length > self.size - self.at:
            raise self._bad(f"{what} claims {length} bytes, {self.size - self.at} are left")
        self.at += length
        return self.data[self.at - length : self.at]

    def _unpack(self, code: str, what: str) -> tuple[int, ...]:
        if self.at + struct.calcsize(code) > self.size:
            raise Refusal(f"{self.file} is truncated: it ends within {what}", hint=AGAIN)
        values = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return values

    def _bad(self, why: str, hint: str = AGAIN) -> Refusal:
        return Refusal(f"{self.file} is not a sound GGUF file: {why}", hint=hint)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
