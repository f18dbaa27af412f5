"""A model source: a GGUF file in a zip archive on this disk."""

import shutil
import zipfile
from pathlib import Path

from llmcli.catalog.sources.base import FetchedFiles
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay


class ZipArchive:
    """A source of the catalog with the fields `path` (the archive) and `file` (the GGUF in it)."""

    name, required_fields = "zip", ("path", "file")

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Extract the file to `folder` and hash it. Raises UserError if that fails."""
        target = folder / Path(spec.file).name
        try:
            with zipfile.ZipFile(spec.path) as archive, archive.open(spec.file) as source:
                folder.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as out:
                    shutil.copyfileobj(source, out)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"cannot read {spec.file} from {spec.path}: {error}") from error
        return FetchedFiles("gguf", target, (hash_file(target, watcher),), spec.label)


SOURCES = (ZipArchive(),)
