"""Opens a remote checkpoint: a checkpoint whose safetensors stay on the hub and are read in parts
while they are quantized. Only its small files, such as config and tokenizer, are downloaded. This
module also finds the models on this disk that were quantized from remote checkpoints.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli import file_lock
from llmcli.catalog import fetch, store
from llmcli.catalog.fetch import FetchedModel, ResolvedRef
from llmcli.catalog.hub.exchange import HubUnreachable
from llmcli.catalog.hub.range_reader import RangesUnsupported, RemoteFile
from llmcli.catalog.model_ref import full_type_name
from llmcli.catalog.sources import hub
from llmcli.catalog.sources.base import RemoteCheckpoint
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.types import ProgressDisplay
from llmcli.units import format_size
from quant.errors import UserError
from quant.source.blob import Blob


def open_remote_checkpoint(
    ref: str,
    config: Config,
    watcher: ProgressDisplay,
    *,
    revision: str | None = None,
    source: str | None = None,
    force: bool = False,
) -> FetchedModel | None:
    """Open the model `ref` as a remote checkpoint.

    Return None if llmcli is offline, or if the model is not a checkpoint, not on the hub, or
    already in the cache. Also return None, after a note, if the server does not send parts of
    files. If the hub does not answer and the model is in the cache, return the model there, after a
    note; `force` forbids this. Raises the same UserErrors as a download.
    """
    resolved = fetch.resolve_ref(ref, config)
    if config.offline or resolved.ref.kind == "path":
        return None
    spec, *other_specs = fetch.allowed_sources(resolved, revision, source)
    if spec.kind != "hub":
        return None
    try:
        with file_lock.hold_lock(
            store.lock_path(config, resolved.ref.name), watcher, resolved.ref.name
        ):
            remote = hub.find_remote_checkpoint(spec, config, watcher)
    except RangesUnsupported as error:
        watcher.note(f"{error}: downloading the whole checkpoint instead")
        return None
    except HubUnreachable as error:
        if other_specs:
            return None  # the download will report the error, and try the other sources
        if force:
            raise
        return _fetch_from_cache(ref, config, watcher, error, revision, source)
    except UserError:
        if other_specs:
            return None
        raise
    return _build_model(resolved, remote, spec.revision, watcher) if remote else None


def _fetch_from_cache(
    ref: str,
    config: Config,
    watcher: ProgressDisplay,
    error: HubUnreachable,
    revision: str | None,
    source: str | None,
) -> FetchedModel:
    """Return the model `ref` from the Hugging Face cache after the hub has not answered. Raises
    `error` if it is not there completely.
    """
    try:
        model = fetch.fetch_model(
            ref, replace(config, offline=True), watcher, revision=revision, source=source
        )
    except UserError:
        raise error from None
    watcher.note(hub.cache_note(error, model.name, model.revision))
    return model


def find_quantized(
    ref: str,
    quant: str | None,
    config: Config,
    watcher: ProgressDisplay,
    *,
    revision: str | None = None,
    source: str | None = None,
) -> FetchedModel | None:
    """Return a model on this disk that was quantized from the remote checkpoint `ref`. Its type is
    `quant`, else the type in `ref`, else preferably the default type.

    Return None if there is no such model, or if the checkpoint itself is on this disk. `revision`,
    `source`: see fetch.fetch_model.
    """
    resolved = fetch.resolve_ref(ref, config)
    if resolved.ref.kind == "path":
        return None
    manifests = [
        manifest
        for manifest in store.remote_quantizations(config, resolved.ref.name)
        if (not revision or revision in (manifest.revision, manifest.settings.get("requested")))
        and source in (None, "hub")
    ]
    file_type = quant or resolved.ref.quant
    default = resolved.entry.quant if resolved.entry else "Q4_K_M"
    if file_type:
        manifests = [
            manifest for manifest in manifests if manifest.file_type == full_type_name(file_type)
        ]
    manifests.sort(key=lambda manifest: manifest.file_type != default)
    if not manifests or fetch.find_local(resolved, config, watcher, revision, source):
        return None
    if not file_type and manifests[0].file_type != default:
        watcher.note(f"{resolved.ref.name} is here as {manifests[0].file_type}")
    return replace(fetch.build_model(resolved, manifests[0]), quant=None)


def _build_model(
    resolved: ResolvedRef, remote: RemoteCheckpoint, requested: str, watcher: ProgressDisplay
) -> FetchedModel:
    """Return a remote checkpoint as a model, and tell the user that it is read in parts.
    `requested`: the requested revision, or "".
    """
    manifest = Manifest(
        resolved.ref.name,
        "folder",
        str(remote.path),
        remote.files,
        remote.source,
        revision=remote.revision,
    )
    nbytes = sum(blob.size for blob in remote.blobs.values())
    watcher.note(
        f"{resolved.ref.name}: reading {format_size(nbytes)} of safetensors in parts from the hub, "
        "without keeping them (--keep-source keeps them)"
    )
    record: dict[str, Any] = {
        "straight": True,
        "from": remote.source,
        "requested": requested or None,
        "sha256_checked": [path.name for path in remote.local_paths],
        "beside": [str(path) for path in remote.local_paths],
    }
    return replace(fetch.build_model(resolved, manifest), blobs=remote.blobs, record=record)


def build_record(model: FetchedModel) -> dict[str, Any]:
    """Return what to record in the manifest of a file quantized from `model`. For a remote
    checkpoint, this includes which of its safetensors have been compared with their sha256.
    """
    if not model.record:
        return {}
    checked, unchecked = _checked_names(list((model.blobs or {}).values()))
    return {
        **model.record,
        "sha256_checked": [*model.record["sha256_checked"], *checked],
        "sha256_unchecked": unchecked,
    }


def describe_check(blobs: Sequence[Blob]) -> str:
    """Return a note about which remote files have been compared with their sha256, and how many
    bytes were read for that only. "" if none of the files is on the hub.
    """
    checked, unchecked = _checked_names(blobs)
    if not checked and not unchecked:
        return ""
    reread = sum(blob.check.reread_bytes for blob in blobs if isinstance(blob, RemoteFile))
    text = (
        f"the sha256 of {len(checked)} of {len(checked) + len(unchecked)} safetensors is the hub's"
    )
    if unchecked:
        text += (
            f"; not checked, because an earlier run had read a part: {', '.join(unchecked[:3])}"
            f"{' …' * (len(unchecked) > 3)}"
        )
    return text + (f"; {format_size(reread)} were read a second time for that" if reread else "")


def _checked_names(blobs: Sequence[Blob]) -> tuple[list[str], list[str]]:
    """Return the names of the remote files that have been compared with their sha256, and the names
    of the others.
    """
    remote = sorted(
        (blob.path.name, blob.check.is_complete) for blob in blobs if isinstance(blob, RemoteFile)
    )
    return (
        [name for name, is_checked in remote if is_checked],
        [name for name, is_checked in remote if not is_checked],
    )


def small_hub_files(config: Config, manifest: Manifest) -> list[Path]:
    """Return the small files in the Hugging Face cache, such as config and tokenizer, that were
    downloaded to quantize a remote checkpoint. `manifest`: the manifest of the quantized model. If
    that was not quantized from a remote checkpoint, the list is empty.
    """
    paths = manifest.settings.get("beside")
    if not manifest.settings.get("straight") or not isinstance(paths, list):
        return []
    return [
        Path(path)
        for path in paths
        if isinstance(path, str) and Path(path).is_relative_to(config.hub_cache)
    ]
