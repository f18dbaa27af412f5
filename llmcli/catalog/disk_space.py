"""Checks before a download or an extraction that the disk has enough free space."""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from llmcli.errors import UserError
from llmcli.units import format_size


def require_free_space(nbytes: int, folder: Path) -> None:
    """Raise UserError if the disk of `folder`, which need not exist yet, has fewer than `nbytes`
    free bytes.
    """
    existing = _existing_part(folder)
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise UserError(
            f"not enough disk space: {format_size(nbytes)} are needed in {folder}, "
            f"{format_size(free)} are free",
            hint="free space (`llmcli gc` shows what it can delete), "
            "then run the same command again",
        )


def require_space_for_files(sizes: Mapping[Path, int]) -> None:
    """Raise UserError if a disk has too little free space for the files that will be written to it.
    `sizes`: bytes by path; the paths need not exist yet, and may be on one disk or on several.
    """
    totals: Counter[int] = Counter()
    for path, size in sizes.items():
        disk = _existing_part(path).stat().st_dev
        totals[disk] += size
        require_free_space(totals[disk], _existing_part(path))


def _existing_part(path: Path) -> Path:
    """Return `path` if it exists, otherwise the nearest parent folder that does."""
    return next(part for part in (path, *path.parents) if part.exists())
