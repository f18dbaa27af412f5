"""The source "local": a file or folder on this disk, which is used where it is and never copied."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from llmcli.catalog.names.gguf_names import is_model_name
from llmcli.catalog.names.shard_names import parse_shard_name
from llmcli.catalog.sources.base import FetchedFiles
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.text_input import expand_path
from llmcli.types import ProgressDisplay
from quant.checkpoint.adapters import adapter_error
from quant.checkpoint.pickles import find_pickles
from quant.errors import list_first


class LocalSource:
    """The kind of source for a GGUF on this disk, or for a folder with config.json and weights."""

    name, required_fields = "local", ("path",)

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Hash the files at `spec.path`. Raises UserError if there is no model."""
        path = expand_path(spec.path).absolute()
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
    weights = _find_files(path, "*.safetensors")
    side_files = [
        file
        for pattern in ("*.json", "tokenizer.model", "tiktoken.model", "1_Pooling/config.json")
        for file in _find_files(path, pattern)
    ]
    if (path / "config.json").is_file() and weights:
        return "folder", [*weights, *side_files]
    ggufs = [file for file in _find_files(path, "*.gguf") if is_model_name(file.name)]
    if len(ggufs) == 1:
        return find_model_files(ggufs[0])
    if ggufs:
        raise UserError(
            f"{path} contains {len(ggufs)} GGUF files: {', '.join(file.name for file in ggufs)}",
            hint=f"choose one: {ggufs[0]}",
        )
    if (path / "config.json").is_file() and (pickles := find_pickles(path)):
        return "folder", [*(file for file in pickles if file not in side_files), *side_files]
    if error := adapter_error(path):
        raise error
    missing = [
        name
        for name, is_present in (
            ("config.json", (path / "config.json").is_file()),
            ("*.safetensors", weights),
        )
        if not is_present
    ]
    skipped = _describe_skipped(path, {*weights, *ggufs})
    raise UserError(
        f"{path} is not a model: no {' and no '.join(missing)}{skipped}",
        hint="give a .gguf file, or a folder with config.json and safetensors",
    )


def _describe_skipped(folder: Path, models: Collection[Path]) -> str:
    """Return the part of the error that says which files of a folder are no models, and why."""
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.name.lower().endswith((".gguf", ".safetensors")) and path not in models
    ]
    reasons = [f"{path.name} ({_reason_to_skip(path)})" for path in files]
    return f"; skipped: {list_first(reasons, 3)}" if reasons else ""


def _reason_to_skip(path: Path) -> str:
    """Return why a file, which has the ending of a model, is none."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink() and not path.exists():
        return f"a link to a missing file, {path.readlink()}"
    if path.is_dir():
        return "a folder"
    return "not a language model" if path.is_file() else "not a file"


def _find_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder that match a pattern, sorted by name, without hidden files,
    links to nothing, and folders.
    """
    return [
        path
        for path in sorted(folder.glob(pattern))
        if path.is_file() and not path.name.startswith(".")
    ]


SOURCES = (LocalSource(),)
