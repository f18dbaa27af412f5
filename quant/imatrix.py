"""Importance matrices: how much each input column of a weight matters, as llama-imatrix measured
it.

Reads llama.cpp's GGUF form and the older .dat, follows common/imatrix-loader.cpp and load_imatrix
(tools/quantize/quantize.cpp). The file is indexed and checked once; sums stay in it until a tensor
is encoded. It knows names and vectors, no recipes.
"""

import hashlib
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from quant import header
from quant.errors import Refusal
from quant.native import Importance
from quant.soundness import MOMENTS
from quant.writer import entry

if TYPE_CHECKING:
    from quant.native import F32

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNKS, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
MODEL, TRANSFORM = (
    "llmcli.imatrix.model",
    "llmcli.imatrix.transform",
)  # ours; llama.cpp's tools pass them over
MAX_NAME = 255  # bytes of a name in the .dat form
MAX_TEXT = 127  # bytes of a text that upstream writes into the quantized file
MAX_MATRICES = 1 << 16  # in one tensor: experts, or heads
STEP = 1 << 20  # values checked at a time
AGAIN = "make it again with llama-imatrix"


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight's sums: `count` floats at `offset` of `file`, as many for each divisor.

    A divisor is how often the sums were added to, one for each expert; 0 for an expert that was
    never seen.
    """

    file: Path
    offset: int
    count: int
    divisors: tuple[float, ...] = field(repr=False)

    def vectors(self, first: int, last: int, columns: int) -> "F32":
        """Mean squares [last - first, columns] of the matrices first .. last; ones for an expert
        never seen.
        """
        import numpy as np

        start, end = first * columns, last * columns
        sums = np.fromfile(self.file, "<f4", end - start, offset=self.offset + 4 * start)
        if sums.size != end - start:
            raise Refusal(f"{self.file} has become shorter while it was read", hint=AGAIN)
        each = self.count // len(self.divisors)
        by = np.array(self.divisors, np.float32)[np.arange(start, end) // each]
        means: F32 = np.ones(sums.size, np.float32)
        np.divide(sums, by, out=means, where=by > 0)
        return means.reshape(last - first, columns)

    def sums(self) -> "F32":
        """The sums as they are stored, [divisors, values of each]."""
        import numpy as np

        found: F32 = np.fromfile(self.file, "<f4", self.count, offset=self.offset)
        if found.size != self.count:
            raise Refusal(f"{self.file} has become shorter while it was read", hint=AGAIN)
        return found.reshape(len(self.divisors), -1)

    def over(self, first: int, last: int, every: int, columns: int) -> Importance:
        """For the rows first .. last of a tensor whose matrices have `every` rows each."""
        return Importance(
            self.vectors(first // every, -(-last // every), columns), every, first % every
        )


@dataclass(frozen=True)
class Imatrix:
    """A whole file; `digest` tells its content, `path` is as the user gave it.

    `chunk_size` is in tokens: 0 in the older form, which does not tell, and whose divisors count
    chunks, not rows. `model` is the Source.fingerprint of what it was gathered from, `transform`
    the digest of the folds which that had; "" and None where the file does not tell, as
    llama-imatrix's do not.
    """

    path: Path
    digest: str
    entries: Mapping[str, Entry]
    datasets: tuple[str, ...]
    chunks: int
    chunk_size: int = 0
    model: str = ""
    transform: str | None = None

    @property
    def dataset(self) -> str:
        """The first text that was read."""
        return self.datasets[0] if self.datasets else ""

    @property
    def keys(self) -> dict[str, bytes]:
        """What llama-quantize writes about it into the new file."""
        told = {"quantize.imatrix.file": _text(os.fsencode(self.path))}
        if self.dataset:
            told["quantize.imatrix.dataset"] = _text(self.dataset.encode())
        told["quantize.imatrix.entries_count"] = entry("uint32", len(self.entries))
        if self.chunks > 0:
            told["quantize.imatrix.chunks_count"] = entry("uint32", self.chunks)
        return told

    def fitting(
        self, tensors: Sequence[tuple[str, Sequence[int]]], transform: str = ""
    ) -> dict[str, Entry]:
        """The entries of these tensors (name, shape with the row length first); one of another size
        is refused, and what was gathered under another `transform` than the tensors have.

        As in llama.cpp the embedding's is passed over instead: it is read as rows, not multiplied.
        """
        if self.transform is not None:
            same_folds(f"{self.path} is the imatrix", self.transform, transform)
        found, wrong = {}, []
        for name, shape in tensors:
            known = self.entries.get(name)
            if known is None:
                continue
            size = shape[0] * math.prod(shape[2:])
            if known.count == size:
                found[name] = known
            elif name not in ("token_embd.weight", "per_layer_token_embd.weight"):
                wrong.append(f"{name} has {known.count} values, the tensor needs {size}")
        if wrong:
            some = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise Refusal(
                f"{self.path} is the imatrix of another model: {some}",
                hint="name this model's --imatrix",
            )
        return found


def same_folds(what: str, theirs: str, mine: str) -> None:
    """Refuse `what` was gathered from a model under other folds: its columns are scaled otherwise,
    or elsewhere.
    """
    if theirs != mine:
        told, own = (f"folds {one[:12]}" if one else "no folds" for one in (theirs, mine))
        raise Refusal(
            f"{what} of a model with {told}, this one has {own}",
            hint="calibrate this very file, or leave the folds as they were",
        )


def _text(blob: bytes) -> bytes:
    """A text as long as upstream writes it, without what is no UTF-8: a character that is cut, a
    file's odd name.
    """
    return entry("string", blob[:MAX_TEXT].decode("utf-8", "ignore"))


def load(path: Path) -> Imatrix:
    """Read an importance file of either form; what cannot be right is a Refusal naming the file."""
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()[:32]
            stream.seek(0)
            if stream.read(4) == header.MAGIC:
                found = _gguf(path, digest)
            else:
                entries, datasets, chunks, chunk_size = _Legacy(path, stream).read()
                found = Imatrix(path, digest, entries, datasets, chunks, chunk_size)
    except FileNotFoundError:
        raise Refusal(
            f"there is no file {path}", hint="check the path given with --imatrix"
        ) from None
    except OSError as error:
        raise Refusal(
            f"{path} cannot be read: {error.strerror or error}", hint="check the path"
        ) from None
    for name, known in found.entries.items():
        _check(path, name, known)
    return found


def _check(path: Path, name: str, known: Entry) -> None:
    """Sums of squares are finite and not negative."""
    import numpy as np

    for start in range(0, known.count, STEP):
        sums = np.fromfile(
            path, "<f4", min(STEP, known.count - start), offset=known.offset + 4 * start
        )
        if not (np.isfinite(sums) & (sums >= 0)).all():
            raise Refusal(f"{path}: {name} holds values that are no sums of squares", hint=AGAIN)


def _gguf(path: Path, digest: str) -> Imatrix:
    part = header.parse(path)
    keys = {item.key: item for item in part.fields}
    said = {key: item.value for key, item in keys.items() if isinstance(item.value, str)}
    if said.get("general.type") == MOMENTS:
        raise Refusal(
            f"{path} holds second moments", hint=f"--moments {path}: they serve as the imatrix, too"
        )
    if missing := [key for key in (DATASETS, CHUNKS, CHUNK_SIZE) if key not in keys]:
        raise Refusal(
            f"{path} is a GGUF file but no imatrix: it lacks {', '.join(missing)}", hint=AGAIN
        )
    tensors = {tensor.name: tensor for tensor in part.tensors}
    names = {
        name.removesuffix(end) for name in tensors for end in (SUMS, COUNTS) if name.endswith(end)
    }
    entries = {
        name: _entry(path, name, tensors.get(name + SUMS), tensors.get(name + COUNTS))
        for name in sorted(names)
    }
    if not entries:
        raise Refusal(f"{path} holds no sums", hint=AGAIN)
    datasets = keys[DATASETS].value
    texts = (
        datasets.blobs() if isinstance(datasets, header.Array) and datasets.kind == "string" else []
    )
    chunks, chunk_size = (_count(path, keys[key]) for key in (CHUNKS, CHUNK_SIZE))
    read = tuple(text.decode("utf-8", "replace") for text in texts)
    return Imatrix(
        path, digest, entries, read, chunks, chunk_size, said.get(MODEL, ""), said.get(TRANSFORM)
    )


def _count(path: Path, field: header.Field) -> int:
    """A number of the head; llama.cpp would abort on one of another kind."""
    if field.kind != "uint32" or not isinstance(field.value, int):
        raise Refusal(f"{path}: {field.key} is no uint32 but {field.kind}", hint=AGAIN)
    return field.value


def _entry(
    path: Path, name: str, sums: header.TensorInfo | None, counts: header.TensorInfo | None
) -> Entry:
    import numpy as np

    if (
        sums is None
        or counts is None
        or {sums.type, counts.type} != {"F32"}
        or not _belong(sums, counts)
    ):
        raise Refusal(f"{path}: the sums and counts of {name} do not belong together", hint=AGAIN)
    stored = np.fromfile(path, "<f4", counts.elements, offset=counts.offset).astype("f8")
    if not np.isfinite(stored).all():
        raise Refusal(f"{path}: the counts of {name} are no numbers", hint=AGAIN)
    divisors = np.maximum(np.floor(stored + 0.5), 0)  # as lround, for what is not negative
    return Entry(path, sums.offset, sums.elements, tuple(divisors.tolist()))


def _belong(sums: header.TensorInfo, counts: header.TensorInfo) -> bool:
    return counts.elements <= MAX_MATRICES and not sums.elements % counts.elements


class _Legacy:
    """A cursor over the .dat form: int32 counts, names and floats one behind the other."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream
        self.size = stream.seek(0, 2)
        stream.seek(0)

    def read(self) -> tuple[dict[str, Entry], tuple[str, ...], int, int]:
        (count,) = self._numbers("<i")
        if not 1 <= count <= self.size // 17:
            raise self._bad(
                f"it is neither a GGUF file nor the older form (it claims {count} entries)"
            )
        entries = dict(self._entries(count))
        if len(entries) != count:
            raise self._bad("a name is there twice")
        if self.stream.tell() == self.size:  # the oldest files end here
            return entries, (), 0, 0
        (chunks,) = self._numbers("<i")
        dataset = self._text(self.size) if self.stream.tell() < self.size else ""
        return entries, (dataset,) if dataset else (), chunks, 0

    def _entries(self, count: int) -> Iterator[tuple[str, Entry]]:
        for _ in range(count):
            name = self._text(MAX_NAME)
            calls, values = self._numbers("<ii")
            offset = self.stream.tell()
            if not name or not 1 <= values <= (self.size - offset) // 4:
                raise self._bad(f"entry {name!r} claims {values} values")
            self.stream.seek(4 * values, 1)
            yield name, Entry(self.path, offset, values, (float(calls if calls > 0 else 1),))

    def _text(self, most: int) -> str:
        (length,) = self._numbers("<i")
        if not 0 <= length <= min(most, self.size - self.stream.tell()):
            raise self._bad(f"a text claims {length} bytes")
        return self.stream.read(length).split(b"\0")[0].decode("utf-8", "replace")

    def _numbers(self, code: str) -> tuple[int, ...]:
        data = self.stream.read(struct.calcsize(code))
        if len(data) != struct.calcsize(code):
            raise self._bad("it ends too early")
        return struct.unpack(code, data)

    def _bad(self, why: str) -> Refusal:
        return Refusal(f"{self.path} is no importance matrix: {why}", hint=AGAIN)
