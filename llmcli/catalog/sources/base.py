"""The interface of a kind of source. It fetches the weights that a Spec describes, and verifies
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from quant.source.blob import Blob


@dataclass(frozen=True, slots=True)
class FetchedFiles:
    """The files of a model after they were fetched.

    `kind`, `path`: a GGUF (its first shard), or the folder of a checkpoint. `files`: all files with
    their sha256. `source`: the label of the Spec. `revision`: the commit on the hub, or None.
    `hub_error`: why the hub could not be asked for the newest commit, so that files in the cache
    are used; None if it was asked, or did not have to be.
    """

    kind: Literal["gguf", "folder"]
    path: Path
    files: tuple[VerifiedFile, ...]
    source: str
    revision: str | None = None
    hub_error: UserError | None = None


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint(FetchedFiles):
    """A checkpoint whose safetensors stay on the hub and are read in parts.

    `blobs`: the safetensors by name. `local_paths`: the downloaded small files, such as the config.
    `files` contains both.
    """

    blobs: Mapping[str, Blob] = field(default_factory=dict)
    local_paths: tuple[Path, ...] = ()


class ModelSource(Protocol):
    """A kind of source, such as the hub or wheels. `name`: the `kind` of its Specs."""

    @property
    def name(self) -> str: ...

    @property
    def required_fields(self) -> tuple[str, ...]:
        """The fields that a Spec of this kind must have."""
        ...

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Fetch and verify the files that `spec` describes. `folder`: the model's folder in the
        store, for sources that have no cache of their own.

        Files of earlier runs are hashed again and used if they are intact. Interrupted downloads
        are resumed if the source supports that. Raises UserError if the files cannot be fetched.
        """
        ...
