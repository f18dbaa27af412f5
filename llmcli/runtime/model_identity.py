"""What identifies a model file: a hash of its content, and stamps that detect changes."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from quant.model_file.model_header import ModelHeader

SAMPLE_BYTES = 4096  # bytes read of each tensor

FileStamp = tuple[tuple[int, int, int], ...]


def content_hash(header: ModelHeader) -> str:
    """Return a hash of a model: its whole header and some bytes from the middle of every tensor.

    Another model, another quantization or a changed tensor gives another hash; the name and the
    folder of the file do not matter. Only a few megabytes are read, even if the file has gigabytes.
    """
    digest = hashlib.sha256()
    for path in header.files:
        tensors = [tensor for tensor in header.tensors if tensor.file == path]
        with path.open("rb") as file:
            digest.update(file.read(min((tensor.offset for tensor in tensors), default=-1)))
            for tensor in tensors:
                file.seek(tensor.offset + max(0, tensor.nbytes - SAMPLE_BYTES) // 2)
                digest.update(file.read(min(SAMPLE_BYTES, tensor.nbytes)))
            digest.update(file.seek(0, 2).to_bytes(8, "little"))
    return digest.hexdigest()


def newest_mtime_ns(header: ModelHeader) -> int:
    """Return when the newest of a model's files was last written, in nanoseconds. This detects
    small edits that the samples of `content_hash` miss.
    """
    return max(path.stat().st_mtime_ns for path in header.files)


def file_stamp(files: Sequence[Path]) -> FileStamp:
    """Return the size, modification time and inode of each file, to detect changes; zeros for a
    missing file.
    """
    stamps = []
    for path in files:
        try:
            now = path.stat()
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((now.st_size, now.st_mtime_ns, now.st_ino))
    return tuple(stamps)
