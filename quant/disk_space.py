"""Checks that a new file fits on its disk, before its first byte is written."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from quant.errors import UserError


def require_disk_space(folder: Path, needed: int, subject: str, alternative: str) -> None:
    """Raise UserError unless the disk of `folder` has at least `needed` free bytes.

    `subject` and `alternative` are inserted into the error: `subject` says what needs the space
    ("the moments need"), and `alternative` says what the user can do instead of freeing space.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} has {free:,} bytes free, {subject} {needed:,}",
            hint=f"free {needed - free:,} bytes, {alternative}",
        )


def reusable_bytes(unfinished: Iterable[Path]) -> int:
    """Return how many bytes the unfinished files of an earlier run occupy on disk. A check of the
    disk counts these bytes as free, because the next run resumes or overwrites the files.

    Returns 0 on systems that do not report the number of a file's blocks.
    """
    if not hasattr(os, "posix_fallocate"):
        return 0
    return sum(file.stat().st_blocks * 512 for file in unfinished if file.exists())
