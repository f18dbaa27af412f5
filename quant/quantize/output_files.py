"""Checks of the paths that models are written to: only files that llmcli has made are replaced, and
nothing is written into the Hugging Face cache.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

from quant.errors import UserError
from quant.gguf.header import read_file_header
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import SHARD_NAME, read_header
from quant.quantize.plan import SETTINGS_KEY, SOURCE_KEY

# Folders of a repository in the Hugging Face cache: models--ORG--NAME/snapshots/COMMIT/….
CACHED_REPO_PREFIXES = ("models--", "datasets--", "spaces--")
CACHE_FOLDERS = ("snapshots", "blobs", "refs")


def require_output_name(out: Path) -> None:
    """Raise UserError if `out`, the path that the user names, is in the Hugging Face cache, or is
    the name of a shard, which would be read as a part of a split model.
    """
    if repo := cached_repo(out):
        raise UserError(
            f"{out} is in the Hugging Face cache of {repo}, whose programs would find it damaged",
            hint=f"choose another folder: -o {out.name}",
        )
    if match := SHARD_NAME.match(out.name):
        raise UserError(
            f"{out.name} is the name of a shard: it would be read as a part of a split model",
            hint=f"-o {out.with_name(match['stem'] + '.gguf')}",
        )


def cached_repo(path: Path) -> str:
    """Return the repository (org/name) whose folder in the Hugging Face cache contains `path`, or ""
    if there is none.
    """
    parts = path.absolute().parts
    for folder, child in itertools.pairwise(parts):
        if folder.startswith(CACHED_REPO_PREFIXES) and child in CACHE_FOLDERS:
            return folder.split("--", 1)[1].replace("--", "/")
    return ""


def require_writable_file(source_files: Iterable[Path], out: Path, *, force: bool = False) -> None:
    """Raise UserError if a file made from `source_files` cannot be written to `out`: the path must
    not be a folder, a device or one of these files. Without `force`, an existing file must be empty,
    or be a file that this program has made.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder", hint=f"name a file: -o {out / 'model.gguf'}")
    if out.exists() and not out.is_file():  # a rename would replace a device by a file
        raise UserError(f"{out} is no ordinary file", hint="choose another name with -o")
    if out.parent.is_file():
        raise UserError(f"{out.parent} is a file, not a folder", hint="choose another path with -o")
    if not out.parent.is_dir():
        raise UserError(
            f"there is no folder {out.parent}", hint=f"create it first: mkdir -p {out.parent}"
        )
    if out.exists() and any(file.exists() and file.samefile(out) for file in source_files):
        raise UserError(f"{out} is the source itself", hint="choose another name with -o")
    if not (force or is_replaceable(out)):
        raise UserError(
            f"{out} exists and was not made by llmcli, so it is not replaced",
            hint="choose another name with -o, or add --force",
        )


def is_replaceable(path: Path) -> bool:
    """Return whether nothing of the user is lost if `path` is replaced: there is no file, it is
    empty, or it is a GGUF with the metadata that `quantize` and `convert` write.
    """
    if not path.exists() or not path.stat().st_size:
        return True
    try:
        keys = {field.key for field in read_file_header(path).fields}
    except UserError:
        return False
    return {SOURCE_KEY, SETTINGS_KEY} <= keys


def find_written(out: Path, source: str, settings: str) -> ModelHeader | None:
    """Return the header of the GGUF `out` if it was made from the source with this fingerprint and
    with these settings, as its metadata says. Otherwise return None.
    """
    if not out.is_file():
        return None
    try:
        header = read_header(out)
    except UserError:
        return None
    keys = header.metadata.get(SOURCE_KEY), header.metadata.get(SETTINGS_KEY)
    return header if keys == (source, settings) else None
