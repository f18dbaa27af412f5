"""Write files so that other programs see either the complete file or no file: write to a temporary
name in the same folder, and then rename.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from llmcli.errors import UserError
from quant.link_safety import create_temporary, open_without_links

CHUNK_BYTES = 1 << 20
FOLDER_NAME_HINT = "a file has the name of the needed folder: choose another path"
HINT_OF_ERRNO = {
    errno.EEXIST: FOLDER_NAME_HINT,
    errno.ENOTDIR: FOLDER_NAME_HINT,
    errno.ENAMETOOLONG: "give a shorter name",
}


class AtomicWriter:
    """A partial download that is appended to, with the hashes of everything in it. It may continue
    the file of an earlier, interrupted attempt. `position` is the number of bytes in the file.
    """

    def __init__(
        self, path: Path, size: int, on_progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Open the partial file `path`, and hash the bytes that are already in it.

        `size`: the size of the complete file, which is part of a git blob id. `on_progress`
        receives the number of new bytes after each write. Bytes that are written a second time
        after `restart` are not reported, so that progress never runs backwards.

        Raises UserError if the file cannot be opened.
        """
        make_folder(path.parent)
        self.path, self.size, self.on_progress = path, size, on_progress
        try:
            # Unbuffered, so that a write error is raised by the write that caused it.
            self.file = open_without_links(path, "a+b", buffering=0)
        except OSError as error:
            raise write_error(path, error) from None
        if self.file.tell() > size:
            self.file.truncate(0)
        self.file.seek(0)
        self._reset_hashes()
        while chunk := self.file.read(CHUNK_BYTES):
            self._add_to_hashes(chunk)
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
        """Append `chunk`, and return its length. Raises UserError if the disk is full. The bytes
        that were written before stay in the file, so a later attempt can continue.
        """
        try:
            remaining = memoryview(chunk)
            while remaining:
                remaining = remaining[self.file.write(remaining) :]
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}",
                hint="free disk space, then run the same command again",
            ) from None
        self._add_to_hashes(chunk)
        if self.position > self.max_position:
            self.on_progress(self.position - self.max_position)
            self.max_position = self.position
        return len(chunk)

    def restart(self) -> None:
        """Empty the file, because the server will send it again from the beginning."""
        self.file.truncate(0)
        self.file.seek(0)
        self._reset_hashes()

    def has_digest(self, digest: str) -> bool:
        """Return whether the contents of the file have the hash `digest` in hexadecimal. A digest
        of 64 digits is a SHA-256, one of 40 digits a git blob id.
        """
        return digest == (self.sha256 if len(digest) == 64 else self.git_hash.hexdigest())

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file so far, in hexadecimal."""
        return self.sha256_hash.hexdigest()

    def commit(self, path: Path) -> None:
        """Flush the complete file to the disk and rename it to `path`. It is closed then."""
        os.fsync(self.file.fileno())
        self.file.close()
        make_folder(path.parent)
        self.path.replace(path)
        sync_folder(path.parent)

    def discard(self) -> None:
        """Close and delete the file, because its contents are wrong."""
        self.file.close()
        self.path.unlink(missing_ok=True)

    def _reset_hashes(self) -> None:
        """Set the position and the hashes to those of an empty file."""
        self.position = 0
        self.sha256_hash = hashlib.sha256()
        self.git_hash = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def _add_to_hashes(self, chunk: bytes) -> None:
        """Update the position and the hashes by the next bytes of the file."""
        self.sha256_hash.update(chunk)
        if self.size < 64 * CHUNK_BYTES:  # larger files are in Git LFS, which uses SHA-256
            self.git_hash.update(chunk)
        self.position += len(chunk)


def make_folder(path: Path) -> None:
    """Create a folder and its parent folders, if they do not exist. Raises UserError if this is not
    possible.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> UserError:
    """Return the UserError that reports an OSError while writing `path`. Its hint depends on the
    cause.
    """
    hint = HINT_OF_ERRNO.get(error.errno or 0, "make room or check the folder's permissions")
    return UserError(f"cannot write {path}: {error.strerror}", hint=hint)


def sync_folder(folder: Path) -> None:
    """Flush the entries of `folder` to the disk, so that a rename in it survives a power failure.
    Do nothing on systems that cannot flush a folder.
    """
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_writable(path: Path) -> None:
    """Raise UserError if `write_atomically` could not write `path`. An existing file there is not
    changed. Missing parent folders are created.
    """
    _require_regular_file(path)
    make_folder(path.parent)
    try:
        temporary, file = create_temporary(path)
        file.close()
        temporary.unlink()
    except OSError as error:
        raise write_error(path, error) from None


def require_distinct_paths(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Raise UserError if a file of `outputs` is also in `inputs`, or twice in `outputs`. Paths of
    None are ignored.
    """
    uses = {
        os.path.realpath(path): "is also read, and would be overwritten" for path in inputs if path
    }
    for path in outputs:
        if path is None:
            continue
        resolved = os.path.realpath(path)
        if resolved in uses:
            raise UserError(f"{path} {uses[resolved]}", hint="choose another name for the output")
        uses[resolved] = "is named for two output files"


def write_atomically(path: Path, *data: bytes | memoryview, mode: int = 0o666) -> None:
    """Write `data`, one after another, to the file `path`. If this fails, an existing file there is
    unchanged, and UserError is raised.

    `mode`: the permissions of the file, from which those in the user's umask are removed.
    """
    _require_regular_file(path)
    make_folder(path.parent)
    temporary: Path | None = None
    try:
        temporary, file = create_temporary(path, mode)
        with file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _require_regular_file(path: Path) -> None:
    """Raise UserError if `path` exists and is not a regular file. A rename would replace a device
    or a pipe, and fail for a folder.
    """
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise UserError(f"cannot write {path}: it is {kind}", hint="give a file name")
    except OSError as error:
        raise write_error(path, error) from None
