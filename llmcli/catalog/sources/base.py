"""What a source is: something that brings the files of a Spec to this disk, verified."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from llmcli.catalog.catalog import Spec
from llmcli.catalog.store import File
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import Watcher
from llmcli.units import size
from quant.blob import Blob


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a source brought: `path` is what to load, `files` are all the files with their sha256."""

    kind: Literal["gguf", "folder"]
    path: Path
    files: tuple[File, ...]
    source: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Remote(Fetched):
    """A checkpoint whose safetensors (`blobs`, by name) stay where they are: of `files` only `here`
    are here.
    """

    blobs: Mapping[str, Blob] = field(default_factory=dict)
    here: tuple[Path, ...] = ()


class Source(Protocol):
    """A kind of place that weights come from."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of a Spec without which it is of no use here."""
        ...

    def fetch(self, spec: Spec, where: Path, config: Config, watcher: Watcher) -> Fetched:
        """Bring `spec` here, into `where` if the source has no place of its own.

        What an earlier try left is resumed; complete files are hashed anew and fetched only where
        they are not what they should be. Raises UserError in one line; what was there before stays.
        """
        ...


def make_room(nbytes: int, where: Path) -> None:
    """Refuse before the first byte what the disk cannot hold."""
    place = next(path for path in (where, *where.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise UserError(
            f"not enough disk: {size(nbytes)} are needed in {where}, {size(free)} are free",
            hint="make room (`llmcli gc` says what it can free), then type the same again",
        )
