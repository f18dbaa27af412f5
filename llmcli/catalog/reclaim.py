"""Giving disk space back: remove one model, or whatever nobody needs any more."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path

from llmcli.catalog import elsewhere, store, straight
from llmcli.catalog.ref import Ref
from llmcli.catalog.sources import hub
from llmcli.catalog.sources.wheel import LOCK, waiting_room
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.errors import UserError
from quant import container
from quant.errors import Refusal


@dataclass(frozen=True, slots=True)
class Item:
    """Something on the disk and why it may go."""

    path: Path
    bytes: int
    why: str


def remove(ref: Ref, config: Config) -> list[Item]:
    """Remove a model with all that was quantized from it, or one quantization (NAME:TYPE).

    Files in the Hugging Face cache go through the library, and only those that no other model of
    ours uses; a file that the user named by its path is never touched. Raises UserError if nothing
    is here.
    """
    one = ref.quant if not (ref.kind == "hub" and store.load(config, ref.full)) else None
    name = ref.name if one else ref.full
    with store.locked(store.lock_file(config, name)) as free:
        if not free:
            raise UserError(
                f"another llmcli is at work on {name}", hint="wait for it, then type the same again"
            )
        return _one_type(ref, one, config) if one else _all(ref, config)


def _one_type(ref: Ref, file_type: str, config: Config) -> list[Item]:
    place = store.derived_folder(config, ref.name, file_type)
    if not place.is_dir():
        raise _absent(ref)
    return [*_beside(place, config), _delete(place, f"{ref.name} as {file_type}")]


def _all(ref: Ref, config: Config) -> list[Item]:
    manifest, place = store.load(config, ref.full), store.folder(config, ref.full)
    if manifest is None and not place.is_dir():
        raise _absent(ref)
    items = []
    if manifest and manifest.source.startswith("hub:"):
        mine = _only_mine(manifest, config)
        items.append(
            Item(
                config.hub_cache,
                hub.remove(config, mine),
                f"{len(mine)} files of {manifest.source} in the Hugging Face cache",
            )
        )
    elif manifest and manifest.source.startswith("local:"):
        items.append(Item(Path(manifest.path), 0, "your own file stays; llmcli forgets it"))
    items += [item for made in sorted(place.glob("*/")) for item in _beside(made, config)]
    return [*items, _delete(place, "what llmcli made of it" if items else ref.full)]


def garbage(config: Config, *, delete: bool = False) -> list[Item]:
    """What can go without loss: partial downloads and files, waiting wheels, records without files.

    A model that another process is working on is left alone. With `delete` each item goes as it is
    found, while its lock is held: nobody can begin with it in between.
    """
    items = []
    for item in chain(
        _wheels(config), _folders(config), _partials(config), _scratch(config), _elsewhere(config)
    ):
        if delete:
            _discard(item, config)
        items.append(item)
    return items


def _discard(item: Item, config: Config) -> None:
    """An item, and the folder it was in where that is empty then, and none of the user's."""
    if item.path.is_dir():
        shutil.rmtree(item.path)
    else:
        item.path.unlink(missing_ok=True)
    folder, ours = item.path.parent, (config.data, config.cache, config.hub_cache)
    if any(folder.is_relative_to(own) for own in ours) and not any(folder.iterdir()):
        folder.rmdir()


def _absent(ref: Ref) -> UserError:
    return UserError(f"{ref.full} is not here", hint="`llmcli list` shows what is")


def _beside(place: Path, config: Config) -> list[Item]:
    """Forget a quantization that came straight from the hub, with the small files it needed and no
    other does.
    """
    manifest = store.read(place / "manifest.json")
    if manifest is None or not (paths := straight.beside(config, manifest)):
        return []
    others = [other for other in store.manifests(config) if other.name != manifest.name]
    shared = {Path(file.path) for other in others for file in other.files}
    shared |= {path for other in others for path in straight.beside(config, other)}
    mine = [path for path in paths if path not in shared]
    (place / "manifest.json").unlink()
    where = f"{len(mine)} small files of {manifest.settings['from']} in the Hugging Face cache"
    return [Item(config.hub_cache, hub.remove(config, mine), where)] if mine else []


def _only_mine(manifest: Manifest, config: Config) -> list[Path]:
    shared = {
        file.path
        for other in store.manifests(config)
        if other.name != manifest.name
        for file in other.files
    }
    return [Path(file.path) for file in manifest.files if file.path not in shared]


def _delete(place: Path, why: str) -> Item:
    item = Item(place, _bytes(place), why)
    shutil.rmtree(place)
    return item


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _wheels(config: Config) -> Iterator[Item]:
    place = waiting_room(config)
    if not place.is_dir():
        return
    with store.locked(config.cache / LOCK) as free:
        for path in sorted(place.iterdir()) if free else ():
            yield Item(path, _bytes(path), "downloaded wheel")


def _partials(config: Config) -> Iterator[Item]:
    for path in hub.incomplete(config):
        yield Item(path, path.stat().st_size, "partial download")


def _scratch(config: Config) -> Iterator[Item]:
    """What a killed verification, measurement or comparison left in the cache; figures that are
    finished stay, but for second moments, which are large.
    """
    copies = {
        "bases": "a checkpoint's copy for a verification",
        "sensitivity": "a copy to measure with",
    }
    for lock in sorted(
        lock for folder in copies for lock in (config.cache / folder).glob("*.lock")
    ):
        with store.locked(lock) as free:
            for path in sorted(lock.parent.glob(f"*{lock.stem}.gguf*")) if free else ():
                yield Item(path, _bytes(path), copies[lock.parent.name])
    for lock in sorted((config.cache / "calibrations").glob("*.lock")):
        with store.locked(lock) as free:
            for path in sorted(lock.parent.glob(f"*{lock.stem}.*")) if free else ():
                if path != lock and path.name != f"{lock.stem}.imatrix.gguf":
                    yield Item(path, _bytes(path), "second moments that can be gathered anew")
    for lock in sorted((config.cache / "pareto").glob("*/lock")):
        with store.locked(lock) as free:
            for path in sorted(lock.parent.iterdir()) if free else ():
                if path != lock and path.suffix != ".json":
                    yield Item(path, _bytes(path), "unfinished comparison")


def _elsewhere(config: Config) -> Iterator[Item]:
    """What a killed run left beside the user's own files."""
    for path in elsewhere.abandoned(config):
        yield Item(path, _bytes(path), "unfinished quantize --sequential")


def _folders(config: Config) -> Iterator[Item]:
    for place in sorted(
        path for path in store.root(config).glob("*") if path.is_dir() and path.name != ".locks"
    ):
        with store.locked(store.root(config) / ".locks" / f"{place.name}.lock") as free:
            if free:
                yield from _folder(place)


def _folder(place: Path) -> Iterator[Item]:
    """What in a model's folder belongs to no whole model."""
    keep = _kept(place)
    for path in sorted(place.iterdir()):
        if path.is_dir():
            whole = _kept(path)
            if not whole:
                yield Item(path, _bytes(path), "unfinished quantization")
            else:
                yield from (
                    Item(file, _bytes(file), "unfinished file")
                    for file in sorted(path.iterdir())
                    if file not in whole
                )
        elif path not in keep:
            yield Item(
                path,
                _bytes(path),
                "record without its files" if path.name == "manifest.json" else "unfinished file",
            )


def _kept(place: Path) -> set[Path]:
    manifest = store.read(place / "manifest.json")
    if manifest is None or not all(Path(file.path).is_file() for file in manifest.files):
        # A whole file whose record is missing or damaged: the next `pull` or `run` takes it up
        # again.
        return {path for path in place.glob("*.gguf") if _whole(path)}
    files = [Path(file.path) for file in manifest.files]
    beside = (path for file in files for path in place.glob(f"{escape(file.stem)}.certificate.*"))
    return {place / "manifest.json", *files, *beside}


def _whole(path: Path) -> bool:
    """Whether a GGUF has all that its header speaks of."""
    try:
        container.read(path)
    except Refusal:
        return False
    return True
