"""Files that appear complete or not at all: written under a temporary name, then renamed."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from llmcli.errors import UserError

CHUNK_BYTES = 1 << 20
FOLDER_NAME_HINT = "a file has the name of the needed folder: choose another path"
HINT_OF_ERRNO = {
    errno.EEXIST: FOLDER_NAME_HINT,
    errno.ENOTDIR: FOLDER_NAME_HINT,
    errno.ENAMETOOLONG: "give a shorter name",
}


class AtomicWriter:
    """A partial file, open for appending, with the hashes of its whole content.

    Content that an earlier attempt left in the file is read at the start, so that the hashes cover
    it. `position` is the number of bytes in the file. `on_progress` receives the number of new
    bytes; bytes that are written again after `restart` are not reported, so that progress never
    runs backwards. `size` is the size of the complete file, which a git blob id needs in advance.
    """

    def __init__(
        self, path: Path, size: int, on_progress: Callable[[int], None] = lambda _: None
    ) -> None:
        make_folder(path.parent)
        self.path, self.size, self.on_progress = path, size, on_progress
        try:
            # Unbuffered, so that a write error is raised by the write that caused it.
            self.file = path.open("a+b", buffering=0)
        except OSError as error:
            raise write_error(path, error) from None
        if self.file.tell() > size:
            self.file.truncate(0)
        self.file.seek(0)
        self._forget()
        while chunk := self.file.read(CHUNK_BYTES):
            self._hash(chunk)
        self.max_position = self.position

    def __enter__(self) -> "AtomicWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()

    def write(self, chunk: bytes) -> int:
        """Append bytes. Raises UserError on a full disk; what is already written stays."""
        try:
            remaining = memoryview(chunk)
            while remaining:
                remaining = remaining[self.file.write(remaining) :]
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}",
                hint="free disk space, then run the same command again",
            ) from None
        self._hash(chunk)
        if self.position > self.max_position:
            self.on_progress(self.position - self.max_position)
            self.max_position = self.position
        return len(chunk)

    def restart(self) -> None:
        """Empty the file, because the server sends it again from the beginning."""
        self.file.truncate(0)
        self.file.seek(0)
        self._forget()

    def has_digest(self, digest: str) -> bool:
        """Return whether the content matches `digest`: 64 hex digits are a sha256, 40 a git blob
        id.
        """
        return digest == (self.sha256 if len(digest) == 64 else self.git_hash.hexdigest())

    @property
    def sha256(self) -> str:
        return self.sha256_hash.hexdigest()

    def commit(self, path: Path) -> None:
        """Make the file durable and rename it to `path`."""
        os.fsync(self.file.fileno())
        self.file.close()
        make_folder(path.parent)
        self.path.replace(path)
        sync_folder(path.parent)

    def discard(self) -> None:
        """Delete the file, because its content is wrong."""
        self.file.close()
        self.path.unlink(missing_ok=True)

    def _forget(self) -> None:
        self.position = 0
        self.sha256_hash = hashlib.sha256()
        self.git_hash = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def _hash(self, chunk: bytes) -> None:
        self.sha256_hash.update(chunk)
        if self.size < 64 * CHUNK_BYTES:  # larger files are in LFS, whose digest is a sha256
            self.git_hash.update(chunk)
        self.position += len(chunk)


def make_folder(path: Path) -> None:
    """Create a folder. Raises UserError if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> UserError:
    """Return a UserError for an OSError while writing `path`."""
    hint = HINT_OF_ERRNO.get(error.errno or 0, "make room or check the folder's permissions")
    return UserError(f"cannot write {path}: {error.strerror}", hint=hint)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power failure, on systems that can flush a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_writable(path: Path) -> None:
    """Raise UserError if `write_atomically` could not replace `path`. Nothing is changed."""
    _ordinary(path)
    make_folder(path.parent)
    temporary = _beside(path)
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666))
        temporary.unlink()
    except OSError as error:
        raise write_error(path, error) from None


def require_distinct_paths(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Raise UserError if a file to be written is also read, or is written twice."""
    uses = {
        os.path.realpath(path.expanduser()): "is also read, and would be overwritten"
        for path in inputs
        if path
    }
    for path in outputs:
        if path is None:
            continue
        resolved = os.path.realpath(path.expanduser())
        if resolved in uses:
            raise UserError(f"{path} {uses[resolved]}", hint="choose another name for the output")
        uses[resolved] = "is named for two output files"


def write_atomically(path: Path, *data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace `path` by the concatenation of `data`, or leave it unchanged.

    `mode` is narrowed by the user's umask.
    """
    _ordinary(path)
    make_folder(path.parent)
    temporary = _beside(path)
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb"
        ) as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def _ordinary(path: Path) -> None:
    """Raise UserError if `path` is a folder, a device or a pipe: a rename would replace it."""
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise UserError(f"cannot write {path}: it is {kind}", hint="give a file name")
    except OSError as error:
        raise write_error(path, error) from None


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")
