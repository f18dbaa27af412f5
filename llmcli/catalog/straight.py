"""Straight from the hub: a checkpoint of which only the small files come here, and what was made of
one.

It decides when that is the way; reading the parts is catalog/hub's affair, and what is made of them
quant's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.catalog import fetch, store
from llmcli.catalog.fetch import Model, Wanted
from llmcli.catalog.hub.ranges import NoRanges
from llmcli.catalog.ref import type_name
from llmcli.catalog.sources import hub
from llmcli.catalog.sources.base import Remote
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.types import Watcher
from llmcli.units import size
from quant.errors import Refusal


def open_checkpoint(
    ref: str,
    config: Config,
    watcher: Watcher,
    *,
    revision: str | None = None,
    source: str | None = None,
) -> Model | None:
    """`ref` as a checkpoint whose safetensors stay on the hub (`blobs`), whatever is here.

    None where that is not the way: offline, no checkpoint, not on the hub, already in its cache, or
    the server gives no parts, which is said. Raises UserError as fetching would.
    """
    wanted = fetch.resolve(ref, config)
    if config.offline or wanted.ref.kind == "path":
        return None
    spec, *others = fetch.allowed(wanted, revision, source)
    if spec.kind != "hub":
        return None
    try:
        with store.locked(store.lock_file(config, wanted.ref.name), watcher, wanted.ref.name):
            remote = hub.remote(spec, config, watcher)
    except NoRanges as error:
        watcher.note(f"{error}: downloading the whole checkpoint instead")
        return None
    except Refusal:
        if others:
            return None  # fetching tells it, and tries the others
        raise
    return _model(wanted, remote, spec.revision, watcher) if remote else None


def made(
    ref: str,
    quant: str | None,
    config: Config,
    watcher: Watcher,
    *,
    revision: str | None = None,
    source: str | None = None,
) -> Model | None:
    """What was made of `ref` straight from the hub, where its checkpoint is not here.

    `quant` or the type in the name must fit; without either, what it becomes by default goes first.
    """
    wanted = fetch.resolve(ref, config)
    if wanted.ref.kind == "path":
        return None
    found = [
        one
        for one in store.straight(config, wanted.ref.name)
        if (not revision or revision in (one.revision, one.settings.get("requested")))
        and source in (None, "hub")
    ]
    asked = quant or wanted.ref.quant
    default = wanted.entry.quant if wanted.entry else "Q4_K_M"
    if asked:
        found = [one for one in found if one.file_type == type_name(asked)]
    found.sort(key=lambda one: one.file_type != default)
    if not found or fetch.here(wanted, config, watcher, revision, source):
        return None
    if not asked and found[0].file_type != default:
        watcher.note(f"{wanted.ref.name} is here as {found[0].file_type}")
    return replace(fetch.model_of(wanted, found[0]), quant=None)


def _model(wanted: Wanted, remote: Remote, requested: str, watcher: Watcher) -> Model:
    manifest = Manifest(
        wanted.ref.name,
        "folder",
        str(remote.path),
        remote.files,
        remote.source,
        revision=remote.revision,
    )
    nbytes = sum(blob.size for blob in remote.blobs.values())
    watcher.note(
        f"{wanted.ref.name}: {size(nbytes)} of safetensors are read in parts, straight from the hub, and not kept "
        f"(--keep-source keeps them). Commit, sizes and ETags are checked; a sha256 of parts cannot be"
    )
    record: dict[str, Any] = {
        "straight": True,
        "from": remote.source,
        "requested": requested or None,
        "sha256_checked": [path.name for path in remote.here],
        "sha256_unchecked": sorted(remote.blobs),
        "beside": [str(path) for path in remote.here],
    }
    return replace(fetch.model_of(wanted, manifest), blobs=remote.blobs, record=record)


def beside(config: Config, manifest: Manifest) -> list[Path]:
    """The small files in the hub's cache that a quantization made straight from it needed."""
    paths = manifest.settings.get("beside")
    if not manifest.settings.get("straight") or not isinstance(paths, list):
        return []
    return [
        Path(path)
        for path in paths
        if isinstance(path, str) and Path(path).is_relative_to(config.hub_cache)
    ]
