"""A file or folder on this disk, used in place and never copied."""

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
    """A GGUF (with all shards of a split one), or a folder with config.json and weights."""

    name, required_fields = "local", ("path",)

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        path = Path(spec.path).expanduser().absolute()
        kind, files = find_model_files(path)
        measured = tuple(hash_file(file, watcher) for file in files)
        return FetchedFiles(kind, path if kind == "folder" else files[0], measured, spec.label)


def find_model_files(path: Path) -> tuple[Literal["gguf", "folder"], list[Path]]:
    """Return the kind of model at `path`, and its files.

    A split GGUF must be named by its first shard. Raises UserError if there is no model.
    """
    if path.is_dir():
        return _folder(path)
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


def _folder(path: Path) -> tuple[Literal["gguf", "folder"], list[Path]]:
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
