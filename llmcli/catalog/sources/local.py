"""The source "local": a file or folder on this disk, which is used where it is and never copied."""

from pathlib import Path
from typing import Literal

from llmcli.catalog.shard_names import parse_shard_name
from llmcli.catalog.sources.base import FetchedFiles
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from quant.checkpoint.pickles import find_pickles


class LocalSource:
    """The kind of source for a GGUF on this disk, or for a folder with config.json and weights."""

    name, required_fields = "local", ("path",)

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Hash the files at `spec.path`. Raises UserError if there is no model."""
        path = Path(spec.path).expanduser().absolute()
        kind, files = find_model_files(path)
        hashed_files = tuple(hash_file(file, watcher) for file in files)
        return FetchedFiles(kind, path if kind == "folder" else files[0], hashed_files, spec.label)


def find_model_files(path: Path) -> tuple[Literal["gguf", "folder"], list[Path]]:
    """Return the kind of the model at `path`, and all its files; of a GGUF, the file to load is the
    first. `path`: a GGUF, which must be the first shard of a split model, or a folder.

    Raises UserError if there is no model, or several, or shards are missing.
    """
    if path.is_dir():
        return _find_in_folder(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}", hint=f"ls {path.parent}")
    if not (shard := parse_shard_name(path.name)):
        return "gguf", [path]
    files = [path.with_name(name) for name in shard.all_names]
    if shard.number != 1:
        raise UserError(
            f"{path.name} is shard {shard.number} of a split model",
            hint=f"name the first one: {files[0]}",
        )
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(
            f"{path} is split, and {', '.join(missing)} is missing",
            hint=f"put the missing shard into {path.parent}",
        )
    return "gguf", files


def _find_in_folder(path: Path) -> tuple[Literal["gguf", "folder"], list[Path]]:
    """Return the kind and the files of the model in a folder: a checkpoint with safetensors, else a
    single GGUF, else a checkpoint with pickles. Raises UserError if there is none of these.
    """
    weights = sorted(path.glob("*.safetensors"))
    side_files = [*sorted(path.glob("*.json")), *sorted(path.glob("tokenizer.model"))]
    if (path / "config.json").is_file() and weights:
        return "folder", [*weights, *side_files]
    ggufs = [
        file
        for file in sorted(path.glob("*.gguf"))
        if not (shard := parse_shard_name(file.name)) or shard.number == 1
    ]
    if len(ggufs) == 1:
        return find_model_files(ggufs[0])
    if ggufs:
        raise UserError(
            f"{path} contains {len(ggufs)} GGUF files: {', '.join(file.name for file in ggufs)}",
            hint=f"choose one: {ggufs[0]}",
        )
    if (path / "config.json").is_file() and (pickles := find_pickles(path)):
        return "folder", [*(file for file in pickles if file not in side_files), *side_files]
    missing = [
        name
        for name, is_present in (
            ("config.json", (path / "config.json").is_file()),
            ("*.safetensors", weights),
        )
        if not is_present
    ]
    raise UserError(
        f"{path} is not a model: no {' and no '.join(missing)}",
        hint="give a .gguf file, or a folder with config.json and safetensors",
    )


SOURCES = (LocalSource(),)
