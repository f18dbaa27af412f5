"""Identify a model file by a hash of its contents, and detect that it has changed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from quant.model_file.model_header import ModelHeader

SAMPLE_BYTES = 4096  # bytes read of each tensor

# for each file its size, modification time in nanoseconds and inode
FileStamp = tuple[tuple[int, int, int], ...]


def content_hash(header: ModelHeader) -> str:
    """Return the SHA-256, in hexadecimal, of a model's whole header and SAMPLE_BYTES bytes from the
    middle of each tensor.

    Another model or another quantization has another hash. The name and the folder of the file do
    not matter. Only a few megabytes are read, so it is fast for files of any size.
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
    """Return the latest modification time of a model's files, in nanoseconds. It detects small
    edits between the bytes that `content_hash` reads.
    """
    return max(path.stat().st_mtime_ns for path in header.files)


def file_stamp(files: Sequence[Path]) -> FileStamp:
    """Return the size, modification time and inode of each file, to compare them later and detect
    changes. A missing file has zeros.
    """
    stamps = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(stamps)
