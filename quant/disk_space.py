"""Refuses a file that does not fit on its disk, before its first byte is written."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from quant.errors import UserError


def require_disk_space(folder: Path, needed: int, subject: str, alternative: str) -> None:
    """Raise UserError unless `folder` has `needed` free bytes.

    `subject` says what needs them ("the moments need"), `alternative` what else the user can do.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} has {free:,} bytes free, {subject} {needed:,}",
            hint=f"free {needed - free:,} bytes, {alternative}",
        )


def reusable_bytes(parts: Iterable[Path]) -> int:
    """Return the bytes on disk of unfinished files, which are resumed or overwritten.

    0 where the system does not count a file's blocks.
    """
    if not hasattr(os, "posix_fallocate"):
        return 0
    return sum(part.stat().st_blocks * 512 for part in parts if part.exists())
