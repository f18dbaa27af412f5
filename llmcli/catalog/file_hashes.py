"""Keep the sha256 of large files, so that a file is read only once for it.

A hash is kept in a small JSON file in the folder cache/hashes, and is valid while the file has the
same size, modification time and inode.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llmcli.atomic_files import write_atomically
from llmcli.catalog.store import combine_hashes, hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from quant.json_dataclasses import read_json

MAX_RECORD_BYTES = 1 << 14
SHOWN_BYTES = 64 << 20  # the progress of reading a larger file is shown
# A file that was changed a shorter time ago may be changed again with the same time stamp.
SETTLED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class HashedFile:
    """The sha256 of a file, and what it was computed from."""

    path: str
    bytes: int
    mtime_ns: int
    inode: int
    device: int
    sha256: str


def hash_files(paths: Sequence[Path], config: Config, watcher: ProgressDisplay) -> str:
    """Return the sha256 of a model's files, as `Manifest.sha256` has it. A file whose hash is not
    kept is read completely; `watcher` shows the progress of a large one.
    """
    hashes = [_hash_or_read(path.absolute(), config, watcher) for path in paths]
    return combine_hashes([(path.name, digest) for path, digest in zip(paths, hashes, strict=True)])


def _hash_or_read(path: Path, config: Config, watcher: ProgressDisplay) -> str:
    record = config.cache / "hashes" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    kept = _read_record(record)
    if kept and kept == _describe(path, kept.sha256):
        return kept.sha256
    before = _describe(path, "")
    digest = hash_file(path, watcher if before.bytes > SHOWN_BYTES else None).sha256
    hashed = _describe(path, digest)
    is_settled = time.time() - hashed.mtime_ns / 1e9 > SETTLED_SECONDS
    if is_settled and before == _describe(path, ""):
        # A folder that cannot be written only means that the file is read again the next time.
        with suppress(UserError):
            write_atomically(record, json.dumps(asdict(hashed)).encode())
    return digest


def _describe(path: Path, sha256: str) -> HashedFile:
    status = path.stat()
    return HashedFile(
        os.fsencode(path).decode("utf-8", "backslashreplace"),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_dev,
        sha256,
    )


def _read_record(path: Path) -> HashedFile | None:
    """Return the record in a file, or None if it is missing or damaged."""
    try:
        return read_json(HashedFile, path, MAX_RECORD_BYTES)
    except (OSError, ValueError):
        return None
