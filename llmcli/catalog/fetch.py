"""Finds a model by its name: a model on this disk is used, any other is downloaded.

Every command gets its models through this module. The transfers, and how they resume, are in
sources/hub.py and hub/retry.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llmcli import file_lock
from llmcli.catalog import catalog, store
from llmcli.catalog.catalog import CatalogEntry
from llmcli.catalog.model_ref import ModelRef, full_type_name, parse_ref
from llmcli.catalog.sources import SOURCES
from llmcli.catalog.sources.base import FetchedFiles
from llmcli.catalog.sources.local import find_model_files
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from quant.source.blob import Blob


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model on this disk.

    `path` is the GGUF to load (the first shard of a split one), or the folder of a float
    checkpoint. `quant` is the type to quantize to: always set for a checkpoint, and None for a GGUF
    unless the name requests another type. `sha256` is empty for a file that was named by its path
    and never pulled. For a checkpoint that stays on the hub, `blobs` are its safetensors, and
    `record` is what the store should record about models quantized from it.
    """

    name: str
    path: Path
    kind: Literal["gguf", "folder"]
    nbytes: int
    sha256: str
    source: str
    revision: str | None = None
    quant: str | None = None
    entry: CatalogEntry | None = None
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, Blob] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResolvedRef:
    """A name with its aliases followed: the sources and the defaults of the model."""

    ref: ModelRef
    entry: CatalogEntry | None
    sources: tuple[Spec, ...]
    system: str | None
    settings: Mapping[str, Any]


def resolve_ref(text: str, config: Config) -> ResolvedRef:
    """Look up a name in the catalog, and follow its aliases to a model.

    The system prompt and settings of an alias override those of its target. Raises UserError.
    """
    entries = catalog.load_catalog(config)
    system: str | None = None
    settings: dict[str, Any] = {}
    outermost: CatalogEntry | None = None
    aliases: list[str] = []
    while True:
        ref = parse_ref(text, entries, config)
        entry = entries[ref.name] if ref.kind == "catalog" else None
        outermost = outermost or entry
        if entry:
            system = entry.system if system is None else system
            settings = {**entry.settings, **settings}
        if entry is None or not entry.alias:
            return ResolvedRef(ref, outermost, _sources(ref, entry), system, settings)
        aliases.append(entry.name)
        text = entry.alias if ref.quant is None else f"{entry.alias}:{ref.quant}"
        if entry.alias in aliases:
            raise UserError(
                f"the aliases {' -> '.join([*aliases, entry.alias])} form a circle",
                hint=f"correct {entry.origin}",
            )


def find_model(
    text: str,
    config: Config,
    watcher: ProgressDisplay,
    *,
    revision: str | None = None,
    source: str | None = None,
) -> FetchedModel | None:
    """Return the model if it is on this disk, without using the network, else None."""
    resolved = resolve_ref(text, config)
    return find_local(resolved, config, watcher, revision, source)


def fetch_model(
    ref: str,
    config: Config,
    watcher: ProgressDisplay,
    *,
    revision: str | None = None,
    source: str | None = None,
    force: bool = False,
) -> FetchedModel:
    """Return the model called `ref`, downloading it if it is not on this disk.

    A model on this disk is used only if it has the `revision` (hub only) and the kind of `source`,
    where these are given. With `force`, the revision is looked up and all files are verified again;
    files that do not match are downloaded. Raises UserError.
    """
    resolved = resolve_ref(ref, config)
    if resolved.ref.kind == "path":
        return _local(resolved, config, watcher)
    specs = allowed_sources(resolved, revision, source)
    if not force and (model := find_local(resolved, config, watcher, revision, source)):
        return model  # no lock is needed, because nothing is downloaded
    with file_lock.hold_lock(
        store.lock_path(config, resolved.ref.name), watcher, resolved.ref.name
    ):
        if not force and (model := find_local(resolved, config, watcher, revision, source)):
            return model
        spec, fetched = _first(resolved, specs, config, watcher)
        name = (
            resolved.ref.full_name
            if resolved.ref.kind == "hub" and fetched.kind == "gguf"
            else resolved.ref.name
        )
        manifest = store.save_manifest(
            config,
            Manifest(
                name=name,
                kind=fetched.kind,
                path=str(fetched.path),
                files=fetched.files,
                source=fetched.source,
                revision=fetched.revision,
                requested=spec.revision or None,
            ),
        )
    return build_model(resolved, manifest)


def register_local(ref: str, config: Config, watcher: ProgressDisplay) -> FetchedModel:
    """Hash a file or folder without moving it, and list it in the store. Raises UserError."""
    resolved = resolve_ref(ref, config)
    if not (manifest := store.load_unchanged(config, resolved.ref.name, watcher)):
        model = _local(resolved, config, watcher)
        _readable(model.kind, model.path)  # checked before the slow hashing
        spec = Spec("local", path=resolved.ref.name)
        fetched = SOURCES["local"].fetch(
            spec, store.model_folder(config, resolved.ref.name), config, watcher
        )
        manifest = store.save_manifest(
            config,
            Manifest(
                resolved.ref.name, fetched.kind, str(fetched.path), fetched.files, fetched.source
            ),
        )
    return build_model(resolved, manifest)


def _sources(ref: ModelRef, entry: CatalogEntry | None) -> tuple[Spec, ...]:
    if entry:
        return entry.sources
    if ref.kind == "hub":
        return (Spec("hub", repo=ref.name, quant=ref.quant or ""),)
    return (Spec("local", path=ref.name),)


def find_local(
    resolved: ResolvedRef,
    config: Config,
    watcher: ProgressDisplay,
    revision: str | None = None,
    source: str | None = None,
) -> FetchedModel | None:
    """Return the model if it is on this disk with this revision and source, else None."""
    if resolved.ref.kind == "path":
        return _local(resolved, config, watcher)
    manifest = (
        store.load_unchanged(config, resolved.ref.full_name, watcher)
        if resolved.ref.kind == "hub"
        else None
    )
    if manifest is None:
        manifest = store.load_unchanged(config, resolved.ref.name, watcher)
        if (
            manifest
            and resolved.ref.kind == "hub"
            and resolved.ref.quant
            and manifest.kind == "gguf"
        ):
            return None  # a file of this repository with another type
    if manifest is None or (revision and revision not in (manifest.revision, manifest.requested)):
        return None
    if source and not manifest.source.startswith(f"{source}:"):
        return None
    return build_model(resolved, manifest)


def _local(resolved: ResolvedRef, config: Config, watcher: ProgressDisplay) -> FetchedModel:
    """Return a model given by its path. It is not hashed, so that slow disks do not delay the
    start.
    """
    path = Path(resolved.ref.name)
    kind, files = find_model_files(path)
    manifest = store.load_manifest(config, resolved.ref.name)
    is_hashed = manifest is not None and all(file.is_unchanged for file in manifest.files)
    return _finish(
        resolved,
        FetchedModel(
            name=resolved.ref.name,
            path=path if kind == "folder" else files[0],
            kind=kind,
            source=f"local:{path}",
            nbytes=sum(file.stat().st_size for file in files),
            sha256=manifest.sha256 if manifest and is_hashed else "",
        ),
    )


def allowed_sources(resolved: ResolvedRef, revision: str | None, source: str | None) -> list[Spec]:
    """Return the sources of the requested kind, with the revision filled in. Raises UserError."""
    kinds = ", ".join(dict.fromkeys(spec.kind for spec in resolved.sources))
    specs = [spec for spec in resolved.sources if source in (None, spec.kind)]
    if not specs:
        raise UserError(
            f"{resolved.ref.name} has no source of kind {source!r}; its kinds: {kinds}",
            hint="leave out --source",
        )
    if revision:
        specs = [replace(spec, revision=revision) for spec in specs if spec.kind == "hub"]
        if not specs:
            raise UserError(
                f"the sources of {resolved.ref.name} have no revisions: {kinds}",
                hint="leave out --revision",
            )
    return specs


def _first(
    resolved: ResolvedRef, specs: list[Spec], config: Config, watcher: ProgressDisplay
) -> tuple[Spec, FetchedFiles]:
    """Fetch from the first source that succeeds; each failure is printed as a note."""
    failures: list[UserError] = []
    for spec in specs:
        if spec.note:
            watcher.note(f"trying {spec.label}: {spec.note}")
        try:
            fetched = SOURCES[spec.kind].fetch(
                spec, store.model_folder(config, resolved.ref.name), config, watcher
            )
            _readable(fetched.kind, fetched.path)
            return spec, fetched
        except UserError as error:
            failures.append(error)
            if len(specs) == 1:
                raise
            watcher.note(f"{spec.label}: {error}")
    reasons = "; ".join(
        f"{spec.label}: {error}" for spec, error in zip(specs, failures, strict=True)
    )
    raise UserError(
        f"every source of {resolved.ref.name} failed ({reasons})",
        hint=next((error.hint for error in failures if error.hint), ""),
    )


def _readable(kind: str, path: Path) -> None:
    """Raise UserError if a GGUF is not complete and valid. Folders are not checked."""
    if kind == "gguf":
        from quant.model_file import read_header

        read_header.read_header(path)


def build_model(resolved: ResolvedRef, manifest: Manifest) -> FetchedModel:
    """Combine a manifest of the store with the catalog's defaults."""
    return _finish(
        resolved,
        FetchedModel(
            name=manifest.name,
            path=Path(manifest.path),
            kind=manifest.kind,
            nbytes=manifest.bytes,
            sha256=manifest.sha256,
            source=manifest.source,
            revision=manifest.revision,
        ),
    )


def _finish(resolved: ResolvedRef, model: FetchedModel) -> FetchedModel:
    """Return `model` with the file type that it should have, the system prompt and the settings.

    They are taken from the name and from the catalog.
    """
    requested = (
        resolved.ref.quant if not (resolved.ref.kind == "hub" and model.kind == "gguf") else None
    )
    default = (
        (resolved.entry.quant if resolved.entry else "Q4_K_M") if model.kind == "folder" else None
    )
    quant = requested or default
    return replace(
        model,
        quant=full_type_name(quant) if quant else None,
        entry=resolved.entry,
        system=resolved.system,
        settings=resolved.settings,
    )
