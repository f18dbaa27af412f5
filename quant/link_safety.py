"""Opens the files that are written next to a result: parts, journals and temporary files. They may be
in a folder where other users can create files, so a symbolic link with such a name is never
followed: it could lead to any file of this user.
"""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, cast

FLAGS_OF_MODE = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+b": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}
# Not available on every system. O_NONBLOCK: opening a pipe must not wait for another process.
SAFE_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
RANDOM_BYTES = 8
MAX_STEM_CHARACTERS = 60  # of a temporary file's name, which has a limited length


def open_without_links(
    path: Path, mode: str, *, buffering: int = -1, permissions: int = 0o666
) -> BinaryIO:
    """Open a file in one of the binary modes of FLAGS_OF_MODE. `permissions`: of a new file, from
    which those in the user's umask are removed.

    Raises OSError if the path is a symbolic link or something else than a regular file, or if the
    file cannot be opened.
    """
    try:
        descriptor = os.open(path, FLAGS_OF_MODE[mode] | SAFE_FLAGS, permissions)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(error.errno, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return cast(BinaryIO, os.fdopen(descriptor, mode, buffering))


def create_temporary(path: Path, permissions: int = 0o666) -> tuple[Path, BinaryIO]:
    """Create a new file in the folder of `path`, whose name begins as that of `path` and cannot be
    guessed. Return its path, and the file open for writing. Raises OSError.
    """
    name = f".{path.name[:MAX_STEM_CHARACTERS]}.{secrets.token_hex(RANDOM_BYTES)}.part"
    temporary = path.with_name(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_FLAGS
    return temporary, os.fdopen(os.open(temporary, flags, permissions), "wb")
