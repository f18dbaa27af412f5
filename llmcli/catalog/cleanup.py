"""Frees disk space: `rm` removes a model, and `gc` removes files that no model needs."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path

from llmcli import file_lock
from llmcli.catalog import prefix_folders, remote_checkpoint, scratch_folders, store
from llmcli.catalog.hub import download
from llmcli.catalog.model_ref import ModelRef
from llmcli.catalog.sources import hub
from llmcli.catalog.sources.wheel import LOCK_NAME, wheel_folder
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.units import format_count
from quant.model_file import read_header


@dataclass(frozen=True, slots=True)
class RemovableItem:
    """A file or folder that can be or was deleted. `nbytes`: the disk space that this frees.
    `reason`: text for the user that says what it is.
    """

    path: Path
    nbytes: int
    reason: str


def remove_model(ref: ModelRef, config: Config) -> list[RemovableItem]:
    """Remove a model with everything that was quantized from it, or only one quantization
    (NAME:TYPE). Return what was removed.

    In the Hugging Face cache, only files that no other model uses are deleted. A file that the user
    pulled by its path is never deleted. Raises UserError if the model is not on this disk, or
    another process works on it.
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
        return _remove_type(ref, file_type, config) if file_type else _remove_all(ref, config)


def _remove_type(ref: ModelRef, file_type: str, config: Config) -> list[RemovableItem]:
    """Remove the quantization of a model to one type. Raises UserError if there is none."""
    folder = store.quantized_folder(config, ref.name, file_type)
    if not folder.is_dir():
        raise _missing_error(ref)
    return [
        *_forget_remote_checkpoint(folder, config),
        _delete_folder(folder, f"{ref.name} as {file_type}"),
    ]


def _remove_all(ref: ModelRef, config: Config) -> list[RemovableItem]:
    """Remove a model and its quantizations. Raises UserError if it is not on this disk."""
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
                f"{format_count(len(unshared), 'file')} of {manifest.source} in the Hugging Face cache",
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
    return [*items, _delete_folder(folder, "what llmcli made from it" if items else ref.full_name)]


def find_garbage(config: Config, *, delete: bool = False) -> list[RemovableItem]:
    """Return what can be deleted without loss: files of interrupted runs, downloaded wheels, records
    of models whose files are missing, and saved states of models that are not here. What another
    process works on is left out.

    `delete`: delete each item as soon as it is found. Its lock is still held then, so that no other
    process can start to use it.
    """
    items = []
    for item in chain(
        _find_wheels(config),
        _find_in_models(config),
        _find_partial_downloads(config),
        _find_cached_scratch_files(config),
        _find_scratch_folders(config),
        _find_saved_states(config),
    ):
        if delete:
            _delete_item(item, config)
        items.append(item)
    return items


def _delete_item(item: RemovableItem, config: Config) -> None:
    """Delete a file or folder. Also delete its parent folder if that is then empty and belongs to
    llmcli or to the Hugging Face cache.
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
    """Delete the files that a remote checkpoint has left in the Hugging Face cache, such as its
    config and tokenizer, unless another model uses them. Return what was deleted.

    `folder`: the folder of a quantization. Its manifest is deleted, too. If it was not quantized
    from a remote checkpoint, do nothing.
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
        Path(file.path) for other_manifest in other_manifests for file in other_manifest.all_files
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
    """Return the files of a model that no other model uses."""
    shared = {
        file.path
        for other_manifest in store.list_manifests(config)
        if other_manifest.name != manifest.name
        for file in other_manifest.all_files
    }
    return [Path(file.path) for file in manifest.all_files if file.path not in shared]


def _delete_folder(folder: Path, reason: str) -> RemovableItem:
    """Delete a folder. Return it as an item with its former size."""
    item = RemovableItem(folder, _size(folder), reason)
    shutil.rmtree(folder)
    return item


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _find_wheels(config: Config) -> Iterator[RemovableItem]:
    """Yield the downloaded wheels, unless another process is downloading or unpacking wheels."""
    folder = wheel_folder(config)
    if not folder.is_dir():
        return
    with file_lock.hold_lock(config.cache / LOCK_NAME) as is_locked:
        for path in sorted(folder.iterdir()) if is_locked else ():
            yield RemovableItem(path, _size(path), "downloaded wheel")


def _find_partial_downloads(config: Config) -> Iterator[RemovableItem]:
    """Yield the unfinished downloads in the Hugging Face cache."""
    for path in download.find_partial_files(config):
        yield RemovableItem(path, path.stat().st_size, "partial download")


def _find_cached_scratch_files(config: Config) -> Iterator[RemovableItem]:
    """Yield files that killed verifications, measurements and comparisons left in llmcli's cache.
    Second moments are yielded even if their measurement was finished, because they are large and
    can be measured again.
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
                yield RemovableItem(path, _size(path), copies[lock.parent.name])
    for lock in sorted((config.cache / "conversions").glob("*.lock")):
        with file_lock.hold_lock(lock) as is_locked:
            folder = lock.with_suffix("")
            if is_locked and folder.is_dir():
                yield RemovableItem(folder, _size(folder), "unfinished conversion")
            if is_locked and not folder.exists():
                lock.unlink(missing_ok=True)
    for lock in sorted((config.cache / "calibrations").glob("*.lock")):
        with file_lock.hold_lock(lock) as is_locked:
            for path in sorted(lock.parent.glob(f"*{lock.stem}.*")) if is_locked else ():
                if path != lock and path.name != f"{lock.stem}.imatrix.gguf":
                    yield RemovableItem(
                        path, _size(path), "second moments that can be measured again"
                    )
    for lock in sorted((config.cache / "pareto").glob("*/lock")):
        with file_lock.hold_lock(lock) as is_locked:
            for path in sorted(lock.parent.iterdir()) if is_locked else ():
                if path != lock and path.suffix != ".json":
                    yield RemovableItem(path, _size(path), "unfinished comparison")


def _find_scratch_folders(config: Config) -> Iterator[RemovableItem]:
    """Yield the scratch folders that killed runs left next to the user's own files."""
    for path in scratch_folders.find_abandoned(config):
        yield RemovableItem(path, _size(path), "unfinished quantize --sequential")


def _find_saved_states(config: Config) -> Iterator[RemovableItem]:
    """Yield what the prefix caches of servers have of models that are not here any more."""
    for path, reason in prefix_folders.find_obsolete(config):
        yield RemovableItem(path, _size(path), reason)


def _find_in_models(config: Config) -> Iterator[RemovableItem]:
    """Yield what can be deleted in the folders of models, except those that are locked."""
    for folder in sorted(
        path
        for path in store.models_folder(config).glob("*")
        if path.is_dir() and path.name != ".locks"
    ):
        with file_lock.hold_lock(
            store.models_folder(config) / ".locks" / f"{folder.name}.lock"
        ) as is_locked:
            if is_locked:
                yield from _find_in_folder(folder)


def _find_in_folder(folder: Path) -> Iterator[RemovableItem]:
    """Yield the files and folders in a model's folder that do not belong to a complete model."""
    needed = _needed_files(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            needed_by_quantization = _needed_files(path)
            if not needed_by_quantization:
                yield RemovableItem(path, _size(path), "unfinished quantization")
            else:
                yield from (
                    RemovableItem(file, _size(file), "unfinished file")
                    for file in sorted(path.iterdir())
                    if file not in needed_by_quantization
                )
        elif path not in needed:
            yield RemovableItem(
                path,
                _size(path),
                "record without its files" if path.name == "manifest.json" else "unfinished file",
            )


def _needed_files(folder: Path) -> set[Path]:
    """Return the files in a folder that belong to a complete model: those that the manifest lists,
    the manifest itself, the certificates and mmproj files. Without a usable manifest, return the
    complete GGUFs.
    """
    manifest = store.read_manifest(folder / "manifest.json")
    if manifest is None or not all(Path(file.path).is_file() for file in manifest.files):
        # The next `pull` or `run` uses a complete GGUF even if its manifest is missing or damaged.
        return {path for path in folder.glob("*.gguf") if _is_complete(path)}
    files = [Path(file.path) for file in manifest.all_files]
    certificates = (
        path for file in files for path in folder.glob(f"{escape(file.stem)}.certificate.*")
    )
    mmproj = folder.glob("mmproj-*.gguf")  # of quantize --mmproj
    return {folder / "manifest.json", *files, *certificates, *mmproj}


def _is_complete(path: Path) -> bool:
    """Return whether a GGUF can be read and contains all tensors that its header lists."""
    try:
        read_header.read_header(path)
    except UserError:
        return False
    return True
