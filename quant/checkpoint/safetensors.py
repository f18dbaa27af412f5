"""The weights of a checkpoint folder in safetensors format, in one file or in shards, as lazy
tensors. They are read without torch.

Every length and offset in a header is checked against the file before it is used.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.checkpoint.folder import REFETCH_HINT, CheckpointFolder
from quant.errors import UserError
from quant.source.blob import Blob, LocalFile, make_row_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from quant.native.ggml import U8

FLOAT_DTYPES = ("F32", "F16", "BF16")
# bytes per value; quantized checkpoints use the dtypes that are not in FLOAT_DTYPES
DTYPE_BYTES = {
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
# Maximum bytes of a safetensors header. The header of 50,000 experts takes 7 MB, and parsed JSON
# takes about thirty times as much memory as its text.
MAX_HEADER_BYTES = 1 << 25
MAX_AXES = 8
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose rows are read from its file, or computed, on demand.

    `shape` is torch's, rows first; a single number has the shape (1,). `dtype` is one of
    DTYPE_BYTES, or a ggml type if the tensor is computed from others. `read(first, last)` returns
    the rows first .. last as uint8 `[rows, row_bytes]`. Rows are counted over all axes but the
    last.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    read: "Callable[[int, int], U8]" = field(repr=False)


def find_safetensors(folder: Path) -> dict[str, Blob]:
    """Return all safetensors files in a folder, by file name. Hidden files, such as those that macOS
    writes next to every file, are left out.
    """
    return {
        path.name: LocalFile(path)
        for path in sorted(folder.glob("*.safetensors"))
        if path.is_file() and not path.name.startswith(".")
    }


def load_tensors(
    folder: CheckpointFolder, blobs: Mapping[str, Blob] | None = None
) -> dict[str, LazyTensor]:
    """Return all tensors of a checkpoint folder by name, read from the shards that its index lists,
    or from model.safetensors if there is no index.

    `blobs` are the safetensors files by name, if they are not in the folder; the index is always in
    the folder. Raises UserError for missing or damaged files.
    """
    blobs = find_safetensors(folder.path) if blobs is None else blobs
    if folder.has_file(INDEX_FILE):
        return load_shards(
            folder, INDEX_FILE, lambda file: read_safetensors(blobs[file.name]), blobs
        )
    if SINGLE_FILE in blobs:
        return {tensor.name: tensor for tensor in read_safetensors(blobs[SINGLE_FILE])}
    other_files = sorted(
        path.name
        for path in folder.path.iterdir()
        if path.suffix in (".bin", ".pt", ".pth", ".safetensors")
    )
    listed = f"; it has {', '.join(other_files[:3])}" if other_files else ""
    raise UserError(
        f"{folder.path} has neither {SINGLE_FILE} nor {INDEX_FILE}{listed}",
        hint="fetch the safetensors of this model",
    )


def read_safetensors(source: Path | Blob) -> Iterator[LazyTensor]:
    """Yield the tensors of one safetensors file. Only the header is read here. Raises UserError if
    the header is damaged or does not fit the file.
    """
    blob = LocalFile(source) if isinstance(source, Path) else source
    file, size = blob.path, blob.size
    length = int.from_bytes(blob.read(0, 8).tobytes(), "little") if size >= 10 else 0
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise _invalid(file, f"its header claims {length} bytes, the file has {size}")
    text = blob.read(8, length).tobytes()
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _invalid(file, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _invalid(file, "its header is not an object")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    tensors = [_tensor(blob, name, entry, start=8 + length) for name, entry in entries.items()]
    _check_coverage(file, [entry["data_offsets"] for entry in entries.values()], size - 8 - length)
    yield from tensors


def _check_coverage(file: Path, spans: list[list[int]], nbytes: int) -> None:
    """Raise UserError if the byte ranges `spans` of the tensors overlap or leave gaps in the
    `nbytes` bytes of data. A wrong header length, for example, shifts all of them.
    """
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise _invalid(
                file,
                f"its tensors do not follow one another: one begins at byte {first}, not {end}",
            )
        end = last
    if end != nbytes:
        raise _invalid(file, f"its tensors end at byte {end} of {nbytes}")


def _tensor(blob: Blob, name: str, entry: Any, start: int) -> LazyTensor:
    """Return the tensor that one entry of a header describes. The data of all tensors begins at
    byte `start`. Raises UserError if the entry is invalid or exceeds the file.
    """
    file = blob.path
    if not isinstance(entry, dict):
        raise _invalid(file, f"tensor {name} is not described")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if (
        not (_is_natural_list(shape) and _is_natural_list(offsets))
        or shape is None
        or offsets is None
        or len(offsets) != 2
    ):
        raise _invalid(file, f"tensor {name} has no valid shape and offsets")
    if len(shape) > MAX_AXES:
        raise _invalid(file, f"tensor {name} has {len(shape)} axes; the limit is {MAX_AXES}")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise UserError(
            f"tensor {name} of {file.name} is stored as {dtype}; supported are {', '.join(DTYPE_BYTES)}",
            hint="name the folder of the model this one was made from",
        )
    first, last = offsets
    elements = 1
    for axis in shape:
        elements *= axis
    if not elements:
        raise UserError(
            f"{file}: tensor {name} has no values: its shape is {shape}",
            hint="save the model again, with the weights of all processes gathered "
            "(zero_to_fp32.py of DeepSpeed), or fetch the file again",
        )
    shape = shape or [1]
    if start + last > blob.size:
        raise UserError(
            f"{file} is truncated: tensor {name} ends at byte {start + last}, the file has "
            f"{blob.size}",
            hint=REFETCH_HINT,
        )
    if last - first != elements * DTYPE_BYTES[dtype]:
        raise _invalid(
            file, f"tensor {name} has {last - first} bytes for {elements} values of {dtype}"
        )
    width = shape[-1] * DTYPE_BYTES[dtype]
    return LazyTensor(name, tuple(shape), dtype, file, make_row_reader(blob, start + first, width))


def _is_natural_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def load_shards(
    checkpoint: CheckpointFolder,
    index_name: str,
    read: "Callable[[Path], Iterable[LazyTensor]]",
    blobs: Mapping[str, Blob] | None = None,
) -> dict[str, LazyTensor]:
    """Return the tensors of all files that the index `index_name` lists, by name.

    `read` yields the tensors of one file. `blobs` are the files that exist; by default they are the
    files in the folder. Raises UserError if a listed file or tensor is missing.
    """
    folder, shard_of_tensor = checkpoint.path, checkpoint.read_json(index_name).get("weight_map")
    if (
        not isinstance(shard_of_tensor, dict)
        or not shard_of_tensor
        or not all(isinstance(shard, str) for shard in shard_of_tensor.values())
    ):
        raise UserError(f"{folder / index_name} has no weight_map", hint=REFETCH_HINT)
    shards = sorted(set(shard_of_tensor.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise UserError(
            f"the index of {folder} names a file outside it: {outside[0]}", hint=REFETCH_HINT
        )
    existing = (
        {path.name for path in folder.iterdir() if path.is_file()}
        if blobs is None
        else blobs.keys()
    )
    if missing := [shard for shard in shards if shard not in existing]:
        raise UserError(f"{folder} has no {', '.join(missing[:3])}", hint="fetch the whole model")
    tensors = {tensor.name: tensor for shard in shards for tensor in read(folder / shard)}
    if missing_tensors := sorted(shard_of_tensor.keys() - tensors.keys()):
        raise UserError(
            f"{folder} has no tensors {', '.join(missing_tensors[:3])}, which its index names",
            hint="fetch the whole model",
        )
    return tensors


def _invalid(file: Path, why: str) -> UserError:
    return UserError(f"{file} is not a valid safetensors file: {why}", hint=REFETCH_HINT)


Tensors = dict[str, LazyTensor]
