"""The interface of a source, which fetches the files of a Spec and verifies them."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from llmcli.units import format_size
from quant.source.blob import Blob


@dataclass(frozen=True, slots=True)
class FetchedFiles:
    """The files that a source fetched.

    `path` is the file or folder to load; `files` are all files with their sha256.
    """

    kind: Literal["gguf", "folder"]
    path: Path
    files: tuple[VerifiedFile, ...]
    source: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint(FetchedFiles):
    """A checkpoint whose safetensors stay on the hub.

    `blobs` are the safetensors by name; `local_paths` are the paths of the downloaded files.
    """

    blobs: Mapping[str, Blob] = field(default_factory=dict)
    local_paths: tuple[Path, ...] = ()


class ModelSource(Protocol):
    """A kind of source, such as the hub or a wheel."""

    @property
    def name(self) -> str: ...

    @property
    def required_fields(self) -> tuple[str, ...]:
        """The fields of a Spec that this source requires."""
        ...

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Fetch the files of `spec`; a source without a cache stores them in `folder`.

        An interrupted download is resumed. Complete files are hashed again and fetched only if they
        differ. Raises UserError; existing files stay.
        """
        ...


def require_free_space(nbytes: int, folder: Path) -> None:
    """Raise UserError if the disk of `folder` has fewer than `nbytes` free bytes."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise UserError(
            f"not enough disk space: {format_size(nbytes)} are needed in {folder}, {format_size(free)} are free",
            hint="free space (`llmcli gc` shows what it can delete), "
            "then run the same command again",
        )
