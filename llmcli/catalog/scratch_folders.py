"""Scratch folders for temporary files next to an output file, as `quantize --sequential` uses them.

For each folder there is a lock file in llmcli's cache that contains the folder's path. So
`llmcli gc` can find the folders of killed runs anywhere on the disk.
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
MAX_PATH_BYTES = 4095  # Linux's PATH_MAX without the final zero byte


def scratch_folder(out: Path) -> Path:
    """Return the path of the scratch folder for the output file `out`."""
    return out.with_name(f".{out.name}{FOLDER_SUFFIX}")


@contextmanager
def claim_work_folder(out: Path, config: Config, watcher: ProgressDisplay) -> Iterator[Path]:
    """Lock the scratch folder for the output file `out` while the with block runs, and yield its
    path. If another process has the lock, wait for it. The folder is not created.
    """
    folder = scratch_folder(out.absolute())
    path_bytes = os.fsencode(folder)
    lock = config.cache / "elsewhere" / f"{hashlib.sha256(path_bytes).hexdigest()[:16]}.lock"
    with file_lock.hold_lock(lock, watcher, str(out)):
        lock.write_bytes(path_bytes)
        yield folder


def find_abandoned(config: Config) -> Iterator[Path]:
    """Yield the existing scratch folders that no process uses. Each folder stays locked until the
    next one is requested.
    """
    for lock in sorted((config.cache / "elsewhere").glob("*.lock")):
        with file_lock.hold_lock(lock) as is_locked:
            if is_locked and (folder := _read_folder(lock)):
                yield folder


def _read_folder(lock: Path) -> Path | None:
    """Return the path in a lock file. Return None if it is not the path of an existing scratch
    folder, because a damaged lock file must not make `gc` delete anything else.
    """
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
