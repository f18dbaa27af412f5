"""Reads the header of a model from all of its shards."""

import re
from pathlib import Path

from quant.errors import UserError
from quant.gguf.header import FileHeader, TensorInfo, read_file_header
from quant.model_file.model_header import ModelHeader


def _duplicate_name(tensors: tuple[TensorInfo, ...]) -> str | None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            return tensor.name
        seen.add(tensor.name)
    return None


def _check_tensor_count(path: Path, first: FileHeader, tensors: tuple[TensorInfo, ...]) -> None:
    total = next((f.value for f in first.fields if f.key == "split.tensors.count"), None)
    if isinstance(total, int) and total != len(tensors):
        raise UserError(
            f"{path} should have {total} tensors over all its parts, but has {len(tensors)}",
            hint="fetch the shards again",
        )


SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def read_header(path: Path) -> ModelHeader:
    """Read the header of a GGUF model.

    If `path` is the first shard of a split model, all shards are read. Raises UserError for files
    that are damaged, incomplete or not GGUF.
    """
    first = read_file_header(path)
    count = next((f.value for f in first.fields if f.key == "split.count"), 0)
    parts = [first]
    if isinstance(count, int) and count > 1:
        parts += [read_file_header(file) for file in _shards(path, count)]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    if double := _duplicate_name(tensors):
        raise UserError(
            f"{path} is not a valid GGUF file: it has tensor {double} twice",
            hint="fetch the shards again",
        )
    _check_tensor_count(path, first, tensors)
    return ModelHeader(
        path,
        tuple(part.file for part in parts),
        first.version,
        first.fields,
        tensors,
        first.alignment,
    )


def _shards(path: Path, count: int) -> list[Path]:
    """Return the paths of the other shards. Raises UserError unless the name of `path` is that of
    the first shard.
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
