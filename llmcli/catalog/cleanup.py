"""Frees disk space: removes one model, or everything that no model needs."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path

from llmcli import file_lock
from llmcli.catalog import remote_checkpoint, scratch_folders, store
from llmcli.catalog.model_ref import ModelRef
from llmcli.catalog.sources import hub
from llmcli.catalog.sources.wheel import LOCK_NAME, wheel_folder
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.errors import UserError
from quant.model_file import read_header


@dataclass(frozen=True, slots=True)
class RemovableItem:
    """A file or folder that can be deleted, its size in bytes, and the reason."""

    path: Path
    nbytes: int
    reason: str


def remove_model(ref: ModelRef, config: Config) -> list[RemovableItem]:
    """Remove a model and everything quantized from it, or one quantization (NAME:TYPE).

    Files in the Hugging Face cache are deleted by huggingface_hub, and only those that no other
    model uses. A file that the user named by its path is never deleted. Raises UserError if the
    model is not on this disk.
    """
    file_type = (
        ref.quant
        if not (ref.kind == "hub" and store.load_manifest(config, ref.full_name))
        else None
    )
    name = ref.name if file_type else ref.full_name
    with file_lock.hold_lock(store.lock_path(config, name)) as is_locked:
        if not is_locked:
            raise UserError(
                f"another llmcli is working on {name}",
                hint="wait for it, then run the same command again",
            )
        return _one_type(ref, file_type, config) if file_type else _all(ref, config)


def _one_type(ref: ModelRef, file_type: str, config: Config) -> list[RemovableItem]:
    folder = store.quantized_folder(config, ref.name, file_type)
    if not folder.is_dir():
        raise _missing_error(ref)
    return [
        *_forget_remote_checkpoint(folder, config),
        _delete(folder, f"{ref.name} as {file_type}"),
    ]


def _all(ref: ModelRef, config: Config) -> list[RemovableItem]:
    manifest, folder = (
        store.load_manifest(config, ref.full_name),
        store.model_folder(config, ref.full_name),
    )
    if manifest is None and not folder.is_dir():
        raise _missing_error(ref)
    items = []
    if manifest and manifest.source.startswith("hub:"):
        unshared = _unshared_files(manifest, config)
        items.append(
            RemovableItem(
                config.hub_cache,
                hub.remove_files(config, unshared),
                f"{len(unshared)} files of {manifest.source} in the Hugging Face cache",
            )
        )
    elif manifest and manifest.source.startswith("local:"):
        items.append(
            RemovableItem(Path(manifest.path), 0, "your own file stays; only its record goes")
        )
    items += [
        item
        for quantization in sorted(folder.glob("*/"))
        for item in _forget_remote_checkpoint(quantization, config)
    ]
    return [*items, _delete(folder, "what llmcli made from it" if items else ref.full_name)]


def find_garbage(config: Config, *, delete: bool = False) -> list[RemovableItem]:
    """Find what can be deleted without loss: partial files, wheels that are not unpacked yet,
    records without files.

    Models that another process works on are skipped. With `delete`, each item is deleted when it is
    found, while its lock is held, so that no other process can start using it in between.
    """
    items = []
    for item in chain(
        _wheels(config), _folders(config), _partials(config), _scratch(config), _elsewhere(config)
    ):
        if delete:
            _discard(item, config)
        items.append(item)
    return items


def _discard(item: RemovableItem, config: Config) -> None:
    """Delete an item. Delete the folder around it, too, if that is empty and in a folder of llmcli
    or in the Hugging Face cache.
    """
    if item.path.is_dir():
        shutil.rmtree(item.path)
    else:
        item.path.unlink(missing_ok=True)
    folder, own_roots = item.path.parent, (config.data, config.cache, config.hub_cache)
    if any(folder.is_relative_to(root) for root in own_roots) and not any(folder.iterdir()):
        folder.rmdir()


def _missing_error(ref: ModelRef) -> UserError:
    return UserError(f"{ref.full_name} is not on this disk", hint="`llmcli list` shows what is")


def _forget_remote_checkpoint(folder: Path, config: Config) -> list[RemovableItem]:
    """Delete what the Hugging Face cache contains only for one quantization of a remote checkpoint.

    `folder` is the folder of the quantization. Its manifest and the small files of the checkpoint
    that no other model uses are deleted. Does nothing for any other folder.
    """
    manifest = store.read_manifest(folder / "manifest.json")
    if manifest is None or not (paths := remote_checkpoint.small_hub_files(config, manifest)):
        return []
    other_manifests = [
        other_manifest
        for other_manifest in store.list_manifests(config)
        if other_manifest.name != manifest.name
    ]
    shared = {
        Path(file.path) for other_manifest in other_manifests for file in other_manifest.files
    }
    shared |= {
        path
        for other_manifest in other_manifests
        for path in remote_checkpoint.small_hub_files(config, other_manifest)
    }
    unshared = [path for path in paths if path not in shared]
    (folder / "manifest.json").unlink()
    reason = f"{len(unshared)} small files of {manifest.settings['from']} in the Hugging Face cache"
    return (
        [RemovableItem(config.hub_cache, hub.remove_files(config, unshared), reason)]
        if unshared
        else []
    )


def _unshared_files(manifest: Manifest, config: Config) -> list[Path]:
    shared = {
        file.path
        for other_manifest in store.list_manifests(config)
        if other_manifest.name != manifest.name
        for file in other_manifest.files
    }
    return [Path(file.path) for file in manifest.files if file.path not in shared]


def _delete(folder: Path, reason: str) -> RemovableItem:
    item = RemovableItem(folder, _bytes(folder), reason)
    shutil.rmtree(folder)
    return item


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _wheels(config: Config) -> Iterator[RemovableItem]:
    folder = wheel_folder(config)
    if not folder.is_dir():
        return
    with file_lock.hold_lock(config.cache / LOCK_NAME) as is_locked:
        for path in sorted(folder.iterdir()) if is_locked else ():
            yield RemovableItem(path, _bytes(path), "downloaded wheel")


def _partials(config: Config) -> Iterator[RemovableItem]:
    for path in hub.find_partial_files(config):
        yield RemovableItem(path, path.stat().st_size, "partial download")


def _scratch(config: Config) -> Iterator[RemovableItem]:
    """Find files that a killed verification, measurement or comparison left in the cache.

    Files of finished runs are not included, except for second moments, which are large and can be
    measured again.
    """
    copies = {
        "bases": "a checkpoint's copy for a verification",
        "sensitivity": "a model copy for measurements",
    }
    for lock in sorted(
        lock for folder in copies for lock in (config.cache / folder).glob("*.lock")
    ):
        with file_lock.hold_lock(lock) as is_locked:
            for path in sorted(lock.parent.glob(f"*{lock.stem}.gguf*")) if is_locked else ():
                yield RemovableItem(path, _bytes(path), copies[lock.parent.name])
    for lock in sorted((config.cache / "calibrations").glob("*.lock")):
        with file_lock.hold_lock(lock) as is_locked:
            for path in sorted(lock.parent.glob(f"*{lock.stem}.*")) if is_locked else ():
                if path != lock and path.name != f"{lock.stem}.imatrix.gguf":
                    yield RemovableItem(
                        path, _bytes(path), "second moments that can be measured again"
                    )
    for lock in sorted((config.cache / "pareto").glob("*/lock")):
        with file_lock.hold_lock(lock) as is_locked:
            for path in sorted(lock.parent.iterdir()) if is_locked else ():
                if path != lock and path.suffix != ".json":
                    yield RemovableItem(path, _bytes(path), "unfinished comparison")


def _elsewhere(config: Config) -> Iterator[RemovableItem]:
    """Find the scratch folders that killed runs left beside the user's own files."""
    for path in scratch_folders.find_abandoned(config):
        yield RemovableItem(path, _bytes(path), "unfinished quantize --sequential")


def _folders(config: Config) -> Iterator[RemovableItem]:
    for folder in sorted(
        path
        for path in store.models_folder(config).glob("*")
        if path.is_dir() and path.name != ".locks"
    ):
        with file_lock.hold_lock(
            store.models_folder(config) / ".locks" / f"{folder.name}.lock"
        ) as is_locked:
            if is_locked:
                yield from _folder_items(folder)


def _folder_items(folder: Path) -> Iterator[RemovableItem]:
    """Find the files and folders in a model's folder that belong to no complete model."""
    needed = _needed_files(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            needed_by_quantization = _needed_files(path)
            if not needed_by_quantization:
                yield RemovableItem(path, _bytes(path), "unfinished quantization")
            else:
                yield from (
                    RemovableItem(file, _bytes(file), "unfinished file")
                    for file in sorted(path.iterdir())
                    if file not in needed_by_quantization
                )
        elif path not in needed:
            yield RemovableItem(
                path,
                _bytes(path),
                "record without its files" if path.name == "manifest.json" else "unfinished file",
            )


def _needed_files(folder: Path) -> set[Path]:
    manifest = store.read_manifest(folder / "manifest.json")
    if manifest is None or not all(Path(file.path).is_file() for file in manifest.files):
        # The next `pull` or `run` uses a complete file even if its record is missing or damaged.
        return {path for path in folder.glob("*.gguf") if _is_complete(path)}
    files = [Path(file.path) for file in manifest.files]
    certificates = (
        path for file in files for path in folder.glob(f"{escape(file.stem)}.certificate.*")
    )
    return {folder / "manifest.json", *files, *certificates}


def _is_complete(path: Path) -> bool:
    """Return whether a GGUF contains everything that its header describes."""
    try:
        read_header.read_header(path)
    except UserError:
        return False
    return True
