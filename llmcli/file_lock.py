"""Lock files between processes."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.atomic_files import cannot_write, make_folder
from llmcli.types import Watcher


@contextmanager
def locked(path: Path, watcher: Watcher | None = None, what: str = "") -> Iterator[bool]:
    """Hold the lock file at `path`; yield whether this process has the lock.

    Without a watcher, yields False at once if another process has the lock. With a watcher, prints
    a note and waits. The kernel frees the lock of a dead process.
    """
    make_folder(path.parent)
    try:
        file = path.open("a")
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if watcher is None:
                yield False
                return
            watcher.note(f"another llmcli is working on {what}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True
