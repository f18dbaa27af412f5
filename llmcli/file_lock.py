"""Lock files between processes."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.atomic_files import write_error, make_folder
from llmcli.types import ProgressDisplay


@contextmanager
def hold_lock(path: Path, watcher: ProgressDisplay | None = None, resource: str = "") -> Iterator[bool]:
    """Hold the lock file at `path`; yield whether this process has the lock.

    Without a watcher, yields False at once if another process has the lock. With a watcher, prints
    a note and waits. The kernel frees the lock of a dead process.
    """
    make_folder(path.parent)
    try:
        file = path.open("a")
    except OSError as error:
        raise write_error(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if watcher is None:
                yield False
                return
            watcher.note(f"another llmcli is working on {resource}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True
