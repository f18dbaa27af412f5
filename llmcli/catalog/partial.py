"""A file that is on its way: written beside, hashed while it is written, renamed when complete.

It is the file object that sources write into. It knows nothing of where the bytes come from.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from llmcli.errors import UserError

CHUNK = 1 << 20
IN_THE_WAY = "a file stands where the folder would be: give another place"
HINTS = {
    errno.EEXIST: IN_THE_WAY,
    errno.ENOTDIR: IN_THE_WAY,
    errno.ENAMETOOLONG: "give a shorter name",
}


class Partial:
    """An open partial file at its end, with the digests of all that is in it.

    What an earlier try left is read once, so that the digests cover it; `position` is where writing
    goes on. `seen` is told how many bytes beyond the furthest point so far: progress never runs
    backwards. `size` is the size of the whole file, which a git blob's id needs beforehand.
    """

    def __init__(self, path: Path, size: int, seen: Callable[[int], None] = lambda _: None) -> None:
        make_folder(path.parent)
        self.path, self.size, self.seen = path, size, seen
        try:
            self.file = path.open(
                "a+b", buffering=0
            )  # what is written is on its way to the disk, or an error now
        except OSError as error:
            raise cannot_write(path, error) from None
        if self.file.tell() > size:
            self.file.truncate(0)
        self.file.seek(0)
        self._forget()
        while chunk := self.file.read(CHUNK):
            self._hash(chunk)
        self.furthest = self.position

    def __enter__(self) -> "Partial":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()

    def write(self, chunk: bytes) -> int:
        """Append; a full disk is the user's to solve, and what is written stays."""
        try:
            rest = memoryview(chunk)
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}",
                hint="make room, then type the same again",
            ) from None
        self._hash(chunk)
        if self.position > self.furthest:
            self.seen(self.position - self.furthest)
            self.furthest = self.position
        return len(chunk)

    def restart(self) -> None:
        """Back to nothing, for a server that sends the whole file again."""
        self.file.truncate(0)
        self.file.seek(0)
        self._forget()

    def matches(self, digest: str) -> bool:
        """Whether the content is what `digest` (64 hex digits: sha256; 40: a git blob's id) says."""
        return digest == (self.sha256 if len(digest) == 64 else self.git.hexdigest())

    @property
    def sha256(self) -> str:
        return self.sha.hexdigest()

    def commit(self, path: Path) -> None:
        """Make the file durable and give it its name."""
        os.fsync(self.file.fileno())
        self.file.close()
        make_folder(path.parent)
        self.path.replace(path)
        sync_folder(path.parent)

    def discard(self) -> None:
        """Delete it: its content is not what it should be."""
        self.file.close()
        self.path.unlink(missing_ok=True)

    def _forget(self) -> None:
        self.position = 0
        self.sha = hashlib.sha256()
        self.git = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def _hash(self, chunk: bytes) -> None:
        self.sha.update(chunk)
        if self.size < 64 * CHUNK:  # larger files are in LFS, where the sha256 is the name
            self.git.update(chunk)
        self.position += len(chunk)


def make_folder(path: Path) -> None:
    """Have a folder to write into; raises UserError where the disk or its owner does not allow it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> UserError:
    """The user's mistake or the disk's behind an OSError."""
    hint = HINTS.get(error.errno or 0, "make room or check the folder's permissions")
    return UserError(f"cannot write {path}: {error.strerror}", hint=hint)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where folders can be flushed."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_place(path: Path) -> None:
    """Raise UserError where `write_whole` could not replace `path`; what is there stays as it is."""
    _ordinary(path)
    make_folder(path.parent)
    beside = _beside(path)
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT, 0o666))
        beside.unlink()
    except OSError as error:
        raise cannot_write(path, error) from None


def check_apart(written: Iterable[Path | None], read: Iterable[Path | None]) -> None:
    """Raise UserError where a file that is to be written is one of those that are read, or two of
    them are one.
    """
    taken = {
        os.path.realpath(path.expanduser()): "is read, and would be lost" for path in read if path
    }
    for path in written:
        if path is None:
            continue
        place = os.path.realpath(path.expanduser())
        if place in taken:
            raise UserError(f"{path} {taken[place]}", hint="give what is written a name of its own")
        taken[place] = "is named for two files that are written"


def write_whole(path: Path, *data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace `path` by the pieces of `data`, or leave it as it was. `mode` is narrowed by the
    user's umask.
    """
    _ordinary(path)
    make_folder(path.parent)
    beside = _beside(path)
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        beside.unlink(missing_ok=True)


def _ordinary(path: Path) -> None:
    """Refuse what a rename would put a file in the place of: a folder, a device, a pipe."""
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no file"
            raise UserError(f"cannot write {path}: it is {kind}", hint="give the name of a file")
    except OSError as error:
        raise cannot_write(path, error) from None


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")
