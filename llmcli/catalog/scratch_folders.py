"""Scratch folders beside the user's own files, such as those of `quantize --sequential`.

For each folder, a lock file in the cache contains the folder's path, so that `llmcli gc` can find
the folders that killed runs left behind.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli import file_lock
from llmcli.config import Config
from llmcli.types import ProgressDisplay

FOLDER_SUFFIX = ".sequential"
MAX_PATH_BYTES = 4095  # bytes of a path: PATH_MAX


def scratch_folder(out: Path) -> Path:
    """Return the scratch folder in which the file `out` is being made."""
    return out.with_name(f".{out.name}{FOLDER_SUFFIX}")


@contextmanager
def claim_work_folder(out: Path, config: Config, watcher: ProgressDisplay) -> Iterator[Path]:
    """Lock and yield the scratch folder for making `out`; wait if another process has the lock.

    The folder is not created.
    """
    folder = scratch_folder(out.absolute())
    path_bytes = os.fsencode(folder)
    lock = config.cache / "elsewhere" / f"{hashlib.sha256(path_bytes).hexdigest()[:16]}.lock"
    with file_lock.hold_lock(lock, watcher, str(out)):
        lock.write_bytes(path_bytes)
        yield folder


def find_abandoned(config: Config) -> Iterator[Path]:
    """Yield the existing scratch folders that no process uses.

    The lock of each folder is held until the next one is requested.
    """
    for lock in sorted((config.cache / "elsewhere").glob("*.lock")):
        with file_lock.hold_lock(lock) as is_locked:
            if is_locked and (folder := _named_folder(lock)):
                yield folder


def _named_folder(lock: Path) -> Path | None:
    """Return the folder that a lock file names, if it is an existing scratch folder."""
    with lock.open("rb") as file:
        path_bytes = file.read(MAX_PATH_BYTES + 1)
    if not path_bytes or len(path_bytes) > MAX_PATH_BYTES or b"\0" in path_bytes:
        return None
    folder = Path(os.fsdecode(path_bytes))
    if not (
        folder.is_absolute() and folder.name.startswith(".") and folder.name.endswith(FOLDER_SUFFIX)
    ):
        return None
    try:
        return folder if folder.is_dir() and not folder.is_symlink() else None
    except OSError:  # an invalid name, or an inaccessible parent folder
        return None
