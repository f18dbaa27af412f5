"""Reads the header of a GGUF model, which may be split into shards."""

import re
import time
from functools import lru_cache
from pathlib import Path

from quant.errors import UserError
from quant.gguf.header import FileHeader, TensorInfo, read_file_header
from quant.model_file.model_header import ModelHeader

MAX_KEPT_HEADERS = 8
# A file that changed so recently may change again without another time of change.
FRESH_SECONDS = 2.0


def _duplicate_name(tensors: tuple[TensorInfo, ...]) -> str | None:
    """Return a name that two tensors have, or None."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            return tensor.name
        seen.add(tensor.name)
    return None


def _check_tensor_count(path: Path, first: FileHeader, tensors: tuple[TensorInfo, ...]) -> None:
    """Raise UserError if the shards have another number of tensors than the first shard records."""
    total = next((f.value for f in first.fields if f.key == "split.tensors.count"), None)
    if isinstance(total, int) and total != len(tensors):
        raise UserError(
            f"{path} should have {total} tensors over all its parts, but has {len(tensors)}",
            hint="fetch the shards again",
        )


SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def read_header(path: Path) -> ModelHeader:
    """Read the header of a GGUF model.

    If `path` is the first shard of a split model, the headers of all shards are read. The headers
    of the latest files are kept until these change. Raises UserError for files that are damaged,
    incomplete or not GGUF.
    """
    first = _read_once(path)
    count = next((f.value for f in first.fields if f.key == "split.count"), 0)
    headers = [first]
    if isinstance(count, int) and count > 1:
        headers += map(_read_once, _shards(path, count))
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if duplicate := _duplicate_name(tensors):
        raise UserError(
            f"{path} is not a valid GGUF file: it has tensor {duplicate} twice",
            hint="fetch the shards again",
        )
    _check_tensor_count(path, first, tensors)
    return ModelHeader(
        path,
        tuple(header.file for header in headers),
        first.version,
        first.fields,
        tensors,
        first.alignment,
    )


def _read_once(path: Path) -> FileHeader:
    """Return the header of a file, which is read again only if the file has changed."""
    try:
        status = path.stat()
    except OSError:
        return read_file_header(path)  # which has the error message
    if time.time() - status.st_mtime < FRESH_SECONDS:
        return read_file_header(path)
    stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return _read_version(path, stamp)


@lru_cache(MAX_KEPT_HEADERS)
def _read_version(path: Path, stamp: tuple[int, ...]) -> FileHeader:
    """Return the header of a file in the state `stamp`."""
    return read_file_header(path)


def _shards(path: Path, count: int) -> list[Path]:
    """Return the paths of all shards except the first. Raises UserError if `path` does not have the
    name of a first shard, or if a shard is missing.
    """
    match = SHARD_NAME.match(path.name)
    if not match or int(match["count"]) != count:
        raise UserError(
            f"{path} is the first of {count} parts, but is not named NAME-00001-of-{count:05}.gguf",
            hint="give the parts their original names",
        )
    names = [f"{match['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]
    if int(match["number"]) != 1:
        raise UserError(
            f"{path} is part {int(match['number'])} of {count}",
            hint=f"name the first part: {path.with_name(names[0])}",
        )
    missing = [name for name in names[1:] if not path.with_name(name).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + " …" * (len(missing) > 3)
        raise UserError(
            f"{path}: {len(missing)} of its {count} parts are missing: {listed}",
            hint="fetch all parts into one folder",
        )
    return [path.with_name(name) for name in names[1:]]
