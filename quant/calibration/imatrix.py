"""Importance matrices: how much each input column of a weight matters, as measured by
llama-imatrix.

Reads llama.cpp's GGUF form and the older .dat form. Loading reads the whole file once to check it,
but keeps only the position of each weight's sums. The sums are read again when a tensor is encoded.

Source: common/imatrix-loader.cpp and load_imatrix (tools/quantize/quantize.cpp).
"""

import hashlib
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from quant.calibration.text_record import TextRecord
from quant.errors import UserError, list_first
from quant.gguf import header
from quant.gguf.layout import encode_entry
from quant.model_file.load_checks import MOMENTS_TYPE
from quant.native.ggml import Importance
from quant.recipes.tensor_types import EMBEDDING_NAMES

if TYPE_CHECKING:
    from quant.native.ggml import F32

SUMS_SUFFIX, COUNTS_SUFFIX = ".in_sum2", ".counts"
DATASETS_KEY, CHUNKS_KEY, CHUNK_SIZE_KEY = (
    "imatrix.datasets",
    "imatrix.chunk_count",
    "imatrix.chunk_size",
)
# llmcli's own keys, which llama.cpp's programs ignore
KINDS_KEY, WINDOWS_KEY = "llmcli.imatrix.text_kinds", "llmcli.imatrix.text_windows"
MODEL_KEY, TRANSFORM_KEY = "llmcli.imatrix.model", "llmcli.imatrix.transform"
MAX_NAME_BYTES = 255  # bytes of a name in the .dat form
MAX_TEXT_BYTES = 127  # longest text that llama.cpp writes into the quantized file, in bytes
MAX_MATRICES = 1 << 16  # most matrices (experts or heads) in a tensor
MAX_LISTED_MISFITS = 5
CHECKED_VALUES = 1 << 20  # values checked at a time
REMAKE_HINT = "make it again with llama-imatrix"


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """The sums of squares of one weight's input columns: `count` float32 values at byte `offset` of
    `file`. They are stored as one row of equally many values for each divisor.

    A divisor is the number of input rows that were added. A weight of experts has one divisor for
    each expert (0 if it received no token), and any other weight has a single divisor.
    """

    file: Path
    offset: int
    count: int
    divisors: tuple[float, ...] = field(repr=False)

    def mean_squares(self, first: int, last: int, columns: int) -> "F32":
        """Return the mean squares [last - first, columns] of the input columns of matrices first ..
        last; ones for an expert without tokens. Raises UserError if the file is now shorter than
        when it was loaded.
        """
        import numpy as np

        start, end = first * columns, last * columns
        sums = np.fromfile(self.file, "<f4", end - start, offset=self.offset + 4 * start)
        if sums.size != end - start:
            raise UserError(f"{self.file} became shorter while it was read", hint=REMAKE_HINT)
        values_each = self.count // len(self.divisors)
        divisors = np.array(self.divisors, np.float32)[np.arange(start, end) // values_each]
        means: F32 = np.ones(sums.size, np.float32)
        np.divide(sums, divisors, out=means, where=divisors > 0)
        return means.reshape(last - first, columns)

    def sums(self) -> "F32":
        """Return the stored sums [divisors, values for each divisor]. Raises UserError if the file
        is now shorter than when it was loaded.
        """
        import numpy as np

        sums: F32 = np.fromfile(self.file, "<f4", self.count, offset=self.offset)
        if sums.size != self.count:
            raise UserError(f"{self.file} became shorter while it was read", hint=REMAKE_HINT)
        return sums.reshape(len(self.divisors), -1)

    def importance(self, first: int, last: int, matrix_rows: int, columns: int) -> Importance:
        """Return the importance of the columns for rows first .. last of a tensor whose matrices
        have `matrix_rows` rows each.
        """
        return Importance(
            self.mean_squares(first // matrix_rows, -(-last // matrix_rows), columns),
            matrix_rows,
            first % matrix_rows,
        )


@dataclass(frozen=True)
class Imatrix:
    """One importance matrix file, with its entries by weight name. `digest` identifies its content,
    and `path` is the path as the user gave it.

    `chunk_size` is in tokens. It is 0 for the older form, which does not record the chunk size and
    whose divisors count chunks instead of rows. `model` is the Source.fingerprint of the model that
    the file was collected from ("" if the file does not record it). `transform` is the digest of
    that model's folds (None if the file does not record it). `text` is about the texts. Files of
    llama-imatrix record only their names.
    """

    path: Path
    digest: str
    entries: Mapping[str, ImatrixEntry]
    text: TextRecord
    chunks: int
    chunk_size: int = 0
    model: str = ""
    transform: str | None = None

    @property
    def dataset(self) -> str:
        """Name of the first calibration text."""
        return self.text.names[0] if self.text.names else ""

    @property
    def metadata(self) -> dict[str, bytes]:
        """Metadata keys about the imatrix that llama-quantize writes into a quantized file, with
        their encoded values.
        """
        metadata = {"quantize.imatrix.file": _text(os.fsencode(self.path))}
        if self.dataset:
            metadata["quantize.imatrix.dataset"] = _text(self.dataset.encode())
        metadata["quantize.imatrix.entries_count"] = encode_entry("uint32", len(self.entries))
        if self.chunks > 0:
            metadata["quantize.imatrix.chunks_count"] = encode_entry("uint32", self.chunks)
        return metadata

    def match_tensors(
        self, tensors: Sequence[tuple[str, Sequence[int]]], transform: str = ""
    ) -> dict[str, ImatrixEntry]:
        """Return the entries of those `tensors` that have one, by name. `tensors` are pairs of a
        name and a shape with the row length first; `transform` is the digest of this model's folds.

        As in llama.cpp, an embedding's entry of the wrong size is ignored, because an embedding's
        rows may be looked up instead of multiplied. Raises UserError if any other entry has the
        wrong size, or if the imatrix was collected with different folds.
        """
        if self.transform is not None:
            require_same_folds(f"{self.path} is the imatrix", self.transform, transform)
        entries, wrong = {}, []
        for name, shape in tensors:
            entry = self.entries.get(name)
            if entry is None:
                continue
            size = shape[0] * math.prod(shape[2:])
            if entry.count == size:
                entries[name] = entry
            elif name not in EMBEDDING_NAMES:
                wrong.append(f"{name} has {entry.count} values, the tensor needs {size}")
        require_same_model(f"{self.path} is the imatrix", wrong, "--imatrix")
        return entries


def require_same_model(subject: str, misfits: Sequence[str], flag: str) -> None:
    """Raise UserError if `misfits` is not empty. Each of its texts describes a statistic whose size
    differs from this model's tensor. `subject` begins the message, and `flag` is the option that
    named the file.
    """
    if misfits:
        raise UserError(
            f"{subject} of another model: {list_first(misfits, MAX_LISTED_MISFITS)}",
            hint=f"name this model's {flag}",
        )


def require_same_folds(subject: str, collected: str, current: str) -> None:
    """Raise UserError if the digest `collected` of the folds of the calibrated model differs from
    the digest `current` of this model's folds, which scale or reorder columns. `subject` begins the
    message.
    """
    if collected != current:
        collected, current = (
            f"folds {digest[:12]}" if digest else "no folds" for digest in (collected, current)
        )
        raise UserError(
            f"{subject} of a model with {collected}, this model has {current}",
            hint="calibrate this very file, or use the same folds",
        )


def _text(blob: bytes) -> bytes:
    """Return an encoded string value, cut to llama.cpp's maximum length. Invalid UTF-8 is removed,
    because the cut may split a character and a file name may contain any bytes.
    """
    return encode_entry("string", blob[:MAX_TEXT_BYTES].decode("utf-8", "ignore"))


def load_imatrix(path: Path) -> Imatrix:
    """Open an importance matrix file in the GGUF form or the older .dat form, and check all its
    values. Raises UserError, with the file's path, if the file is missing or invalid.
    """
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
            stream.seek(0)
            if stream.read(4) == header.MAGIC:
                imatrix = _read_gguf(path, digest)
            else:
                entries, datasets, chunks, chunk_size = _DatReader(path, stream).read()
                imatrix = Imatrix(path, digest, entries, TextRecord(datasets), chunks, chunk_size)
    except FileNotFoundError:
        raise UserError(
            f"there is no file {path}", hint="check the path given with --imatrix"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", hint="check the path"
        ) from None
    for name, entry in imatrix.entries.items():
        _check(path, name, entry)
    return imatrix


def _check(path: Path, name: str, entry: ImatrixEntry) -> None:
    """Raise UserError unless all sums of squares are finite and not negative."""
    import numpy as np

    for start in range(0, entry.count, CHECKED_VALUES):
        sums = np.fromfile(
            path, "<f4", min(CHECKED_VALUES, entry.count - start), offset=entry.offset + 4 * start
        )
        if not (np.isfinite(sums) & (sums >= 0)).all():
            raise UserError(
                f"{path}: {name} contains values that are no sums of squares", hint=REMAKE_HINT
            )


def _read_gguf(path: Path, digest: str) -> Imatrix:
    """Return the importance matrix in a GGUF file. Raises UserError if the file contains no
    imatrix.
    """
    file_header = header.read_file_header(path)
    keys = {item.key: item for item in file_header.fields}
    texts_by_key = {key: item.value for key, item in keys.items() if isinstance(item.value, str)}
    if texts_by_key.get("general.type") == MOMENTS_TYPE:
        raise UserError(
            f"{path} contains second moments",
            hint=f"use --moments {path}: they serve as the imatrix, too",
        )
    if missing := [key for key in (DATASETS_KEY, CHUNKS_KEY, CHUNK_SIZE_KEY) if key not in keys]:
        raise UserError(
            f"{path} is a GGUF file but no imatrix: {', '.join(missing)} missing", hint=REMAKE_HINT
        )
    tensors = {tensor.name: tensor for tensor in file_header.tensors}
    names = {
        name.removesuffix(end)
        for name in tensors
        for end in (SUMS_SUFFIX, COUNTS_SUFFIX)
        if name.endswith(end)
    }
    entries = {
        name: _entry(path, name, tensors.get(name + SUMS_SUFFIX), tensors.get(name + COUNTS_SUFFIX))
        for name in sorted(names)
    }
    if not entries:
        raise UserError(f"{path} contains no sums", hint=REMAKE_HINT)
    chunks, chunk_size = (_count(path, keys[key]) for key in (CHUNKS_KEY, CHUNK_SIZE_KEY))
    windows = _array(keys, WINDOWS_KEY, "uint32")
    text = TextRecord(
        _strings(keys, DATASETS_KEY),
        _strings(keys, KINDS_KEY),
        tuple(map(int, windows.read_values())) if windows else (),
    )
    return Imatrix(
        path,
        digest,
        entries,
        text,
        chunks,
        chunk_size,
        texts_by_key.get(MODEL_KEY, ""),
        texts_by_key.get(TRANSFORM_KEY),
    )


def _array(
    keys: Mapping[str, header.MetadataField], key: str, kind: str
) -> header.GgufArray | None:
    """Return a metadata array of this kind of elements; None if there is none."""
    value = keys[key].value if key in keys else None
    return value if isinstance(value, header.GgufArray) and value.kind == kind else None


def _strings(keys: Mapping[str, header.MetadataField], key: str) -> tuple[str, ...]:
    """Return the strings of a metadata array; none if there is none."""
    array = _array(keys, key, "string")
    return tuple(text.decode("utf-8", "replace") for text in array.read_strings()) if array else ()


def _count(path: Path, field: header.MetadataField) -> int:
    """Return the number in a metadata field. Raises UserError if the field is not a uint32;
    llama.cpp aborts on other types.
    """
    if field.kind != "uint32" or not isinstance(field.value, int):
        raise UserError(f"{path}: {field.key} is {field.kind} instead of uint32", hint=REMAKE_HINT)
    return field.value


def _entry(
    path: Path, name: str, sums: header.TensorInfo | None, counts: header.TensorInfo | None
) -> ImatrixEntry:
    """Return the entry of the weight `name` from its two tensors. Raises UserError if one is
    missing, or if they do not match each other.
    """
    import numpy as np

    if (
        sums is None
        or counts is None
        or {sums.type, counts.type} != {"F32"}
        or not _shapes_match(sums, counts)
    ):
        raise UserError(f"{path}: the sums and counts of {name} do not match", hint=REMAKE_HINT)
    stored_counts = np.fromfile(path, "<f4", counts.elements, offset=counts.offset).astype("f8")
    if not np.isfinite(stored_counts).all():
        raise UserError(f"{path}: the counts of {name} are not finite", hint=REMAKE_HINT)
    # rounds as lround does for non-negative values
    divisors = np.maximum(np.floor(stored_counts + 0.5), 0)
    return ImatrixEntry(path, sums.offset, sums.elements, tuple(divisors.tolist()))


def _shapes_match(sums: header.TensorInfo, counts: header.TensorInfo) -> bool:
    return counts.elements <= MAX_MATRICES and not sums.elements % counts.elements


class _DatReader:
    """A reader of the older .dat form, in which int32 counts, names and float32 values follow one
    another.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream
        self.size = stream.seek(0, 2)
        stream.seek(0)

    def read(self) -> tuple[dict[str, ImatrixEntry], tuple[str, ...], int, int]:
        """Return the entries by name, the names of the texts, the number of chunks, and 0 as the
        chunk size, which the form does not record.
        """
        (count,) = self._numbers("<i")
        if not 1 <= count <= self.size // 17:
            raise self._invalid(
                f"it is neither a GGUF file nor the older form (it claims {count} entries)"
            )
        entries = dict(self._entries(count))
        if len(entries) != count:
            raise self._invalid("a name occurs twice")
        if self.stream.tell() == self.size:  # the oldest files end before the number of chunks
            return entries, (), 0, 0
        (chunks,) = self._numbers("<i")
        dataset = self._text(self.size) if self.stream.tell() < self.size else ""
        return entries, (dataset,) if dataset else (), chunks, 0

    def _entries(self, count: int) -> Iterator[tuple[str, ImatrixEntry]]:
        for _ in range(count):
            name = self._text(MAX_NAME_BYTES)
            calls, values = self._numbers("<ii")
            offset = self.stream.tell()
            if not name or not 1 <= values <= (self.size - offset) // 4:
                raise self._invalid(f"entry {name!r} claims {values} values")
            self.stream.seek(4 * values, 1)
            yield name, ImatrixEntry(self.path, offset, values, (float(calls if calls > 0 else 1),))

    def _text(self, max_bytes: int) -> str:
        (length,) = self._numbers("<i")
        if not 0 <= length <= min(max_bytes, self.size - self.stream.tell()):
            raise self._invalid(f"a text claims {length} bytes")
        return self.stream.read(length).split(b"\0")[0].decode("utf-8", "replace")

    def _numbers(self, code: str) -> tuple[int, ...]:
        data = self.stream.read(struct.calcsize(code))
        if len(data) != struct.calcsize(code):
            raise self._invalid("it ends too early")
        return struct.unpack(code, data)

    def _invalid(self, why: str) -> UserError:
        return UserError(f"{self.path} is no importance matrix: {why}", hint=REMAKE_HINT)
