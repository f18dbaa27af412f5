"""Checks that a file fits on its disk before its first byte is written."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from quant.errors import UserError


def require_disk_space(folder: Path, needed: int, subject: str, alternative: str) -> None:
    """Raise UserError unless the disk of `folder` has `needed` free bytes.

    In the message, `subject` says what needs the space ("the moments need"), and `alternative` what
    else the user can do.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} has {free:,} bytes free, {subject} {needed:,}",
            hint=f"free {needed - free:,} bytes, {alternative}",
        )


def reusable_bytes(parts: Iterable[Path]) -> int:
    """Return the bytes that unfinished files occupy on disk; they are resumed or overwritten, so
    these bytes count as free.

    Returns 0 on systems that do not report a file's blocks.
    """
    if not hasattr(os, "posix_fallocate"):
        return 0
    return sum(part.stat().st_blocks * 512 for part in parts if part.exists())
