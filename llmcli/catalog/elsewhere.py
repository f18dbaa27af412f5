"""Work under way in folders beside the user's own files: each has a lock in the cache that says
where it lies, so that gc finds what a killed run left and nobody went on with.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.catalog import store
from llmcli.config import Config
from llmcli.types import Watcher

ENDING = ".sequential"
LONGEST = 4095  # bytes of a place: PATH_MAX


def folder_of(out: Path) -> Path:
    """The folder that a file is made in."""
    return out.with_name(f".{out.name}{ENDING}")


@contextmanager
def at_work(out: Path, config: Config, watcher: Watcher) -> Iterator[Path]:
    """The folder to make `out` in, which need not be there, while no other process does; waits for
    one that does.
    """
    folder = folder_of(out.absolute())
    place = os.fsencode(folder)
    lock = config.cache / "elsewhere" / f"{hashlib.sha256(place).hexdigest()[:16]}.lock"
    with store.locked(lock, watcher, str(out)):
        lock.write_bytes(place)
        yield folder


def abandoned(config: Config) -> Iterator[Path]:
    """The folders that are there and that nobody works in, each while its lock is held."""
    for lock in sorted((config.cache / "elsewhere").glob("*.lock")):
        with store.locked(lock) as free:
            if free and (folder := _told(lock)):
                yield folder


def _told(lock: Path) -> Path | None:
    """The place that a lock names, if a folder of ours is there."""
    with lock.open("rb") as file:
        place = file.read(LONGEST + 1)
    if not place or len(place) > LONGEST or b"\0" in place:
        return None
    folder = Path(os.fsdecode(place))
    if not (folder.is_absolute() and folder.name.startswith(".") and folder.name.endswith(ENDING)):
        return None
    try:
        return folder if folder.is_dir() and not folder.is_symlink() else None
    except OSError:  # no name for a folder, or one behind a door that is shut
        return None
