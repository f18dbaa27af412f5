"""Lock files between processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.atomic_files import make_folder, write_error
from llmcli.types import ProgressDisplay


@contextmanager
def hold_lock(
    path: Path, watcher: ProgressDisplay | None = None, resource: str = ""
) -> Iterator[bool]:
    """Hold the lock file at `path` inside the block; yield whether this process has the lock.

    If another process has the lock: without a watcher, yields False at once; with a watcher, prints
    a note that names `resource`, and waits. The kernel frees the lock of a dead process.
    """
    from filelock import FileLock, Timeout

    make_folder(path.parent)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if watcher is None:
            yield False
            return
        watcher.note(f"another llmcli is working on {resource}; waiting for it")
        lock.acquire()
    except OSError as error:
        raise write_error(path, error) from None
    try:
        yield True
    finally:
        lock.release()
