"""Checks before a download or an extraction that the disk has enough free space."""

import shutil
from pathlib import Path

from llmcli.errors import UserError
from llmcli.units import format_size


def require_free_space(nbytes: int, folder: Path) -> None:
    """Raise UserError if the disk of `folder`, which need not exist yet, has fewer than `nbytes`
    free bytes.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise UserError(
            f"not enough disk space: {format_size(nbytes)} are needed in {folder}, "
            f"{format_size(free)} are free",
            hint="free space (`llmcli gc` shows what it can delete), "
            "then run the same command again",
        )
