"""Checkpoints that are read from the hub in parts, and the models quantized from them.

Only the small files are downloaded; the safetensors stay on the hub.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli import file_lock
from llmcli.catalog import fetch, store
from llmcli.catalog.fetch import Model, Wanted
from llmcli.catalog.hub.range_reader import NoRanges
from llmcli.catalog.model_ref import type_name
from llmcli.catalog.sources import hub
from llmcli.catalog.sources.base import Remote
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.types import Watcher
from llmcli.units import size
from quant.errors import UserError


def open_checkpoint(
    ref: str,
    config: Config,
    watcher: Watcher,
    *,
    revision: str | None = None,
    source: str | None = None,
) -> Model | None:
    """Open `ref` as a checkpoint whose safetensors stay on the hub.

    Returns None if that is not possible: offline, not a checkpoint, not on the hub, already in the
    cache, or (with a note) if the server does not send parts. Raises UserError as downloading
    would.
    """
    resolved = fetch.resolve(ref, config)
    if config.offline or resolved.ref.kind == "path":
        return None
    spec, *other_specs = fetch.allowed(resolved, revision, source)
    if spec.kind != "hub":
        return None
    try:
        with file_lock.locked(
            store.lock_file(config, resolved.ref.name), watcher, resolved.ref.name
        ):
            remote = hub.remote(spec, config, watcher)
    except NoRanges as error:
        watcher.note(f"{error}: downloading the whole checkpoint instead")
        return None
    except UserError:
        if other_specs:
            return None  # downloading reports the error, and tries the other sources
        raise
    return _model(resolved, remote, spec.revision, watcher) if remote else None


def made(
    ref: str,
    quant: str | None,
    config: Config,
    watcher: Watcher,
    *,
    revision: str | None = None,
    source: str | None = None,
) -> Model | None:
    """Find a model that was quantized from the remote checkpoint of `ref`.

    Returns None if the checkpoint itself is on this disk. Its type must be `quant` or the type in
    the name; without either, the default type is preferred.
    """
    resolved = fetch.resolve(ref, config)
    if resolved.ref.kind == "path":
        return None
    manifests = [
        manifest
        for manifest in store.straight(config, resolved.ref.name)
        if (not revision or revision in (manifest.revision, manifest.settings.get("requested")))
        and source in (None, "hub")
    ]
    file_type = quant or resolved.ref.quant
    default = resolved.entry.quant if resolved.entry else "Q4_K_M"
    if file_type:
        manifests = [
            manifest for manifest in manifests if manifest.file_type == type_name(file_type)
        ]
    manifests.sort(key=lambda one: one.file_type != default)
    if not manifests or fetch.here(resolved, config, watcher, revision, source):
        return None
    if not file_type and manifests[0].file_type != default:
        watcher.note(f"{resolved.ref.name} is here as {manifests[0].file_type}")
    return replace(fetch.model_of(resolved, manifests[0]), quant=None)


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
        f"{wanted.ref.name}: reading {size(nbytes)} of safetensors in parts from the hub, "
        "without keeping them (--keep-source keeps them). Commit, sizes and ETags are checked; "
        "the sha256 of parts cannot be checked"
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
    """Return the small files in the hub's cache that a remote quantization needed."""
    paths = manifest.settings.get("beside")
    if not manifest.settings.get("straight") or not isinstance(paths, list):
        return []
    return [
        Path(path)
        for path in paths
        if isinstance(path, str) and Path(path).is_relative_to(config.hub_cache)
    ]
