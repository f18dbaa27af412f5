"""Lock files, with which llmcli processes exclude each other from a resource."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.atomic_files import make_folder, write_error
from llmcli.types import ProgressDisplay

POLL_SECONDS = 0.02  # between two tries to get a lock within `seconds`


@contextmanager
def hold_lock(
    path: Path,
    watcher: ProgressDisplay | None = None,
    resource: str = "",
    seconds: float = 0.0,
) -> Iterator[bool]:
    """Hold the lock file at `path` during the `with` block. Yield whether this process has the
    lock.

    If another process has the lock, there are two cases. Without `watcher`, False is yielded at
    once, or after `seconds` seconds in which the lock was not released. With `watcher`, a note that
    names `resource` is printed there, and this process waits for the lock. The kernel releases the lock of a process that has died.

    Raises UserError if the lock file cannot be written.
    """
    from filelock import FileLock, Timeout

    make_folder(path.parent)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=seconds, poll_interval=POLL_SECONDS)
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
