"""Returns a model for the name that the user typed. If the model is not on this disk, it is
downloaded.

All commands get their models from this module. The downloads themselves are in sources/ and
hub/download.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llmcli import file_lock
from llmcli.catalog import catalog, store
from llmcli.catalog.catalog import CatalogEntry
from llmcli.catalog.model_ref import ModelRef, describe_default, full_type_name, parse_ref
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
    """A model on this disk, with the settings that its name stands for.

    - `path`: the GGUF to load (the first shard of a split model), or the folder of a checkpoint.
    - `nbytes`, `sha256`: of all files. The sha256 is empty for a path that was never pulled.
    - `source`: where the files are from, such as `hub:org/repo`; `revision`: the hub's commit.
    - `quant`: the type to which the model should be quantized; None if it is used as it is. Always
      set for a checkpoint.
    - `entry`, `system`, `settings`: the entry of the catalog, and its default system text and
      sampling settings.
    - `blobs`, `record`: only for a checkpoint that stays on the hub (remote_checkpoint.py): its
      safetensors by name, and what to record in the manifest of a model quantized from it.
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
    """A model name after all aliases were replaced by their targets.

    `ref`: the name of the model itself. `entry`: the first catalog entry, which may be an alias, or
    None. `sources`: where the weights can be fetched. `system`, `settings`: the defaults of the
    model and of its aliases. `note`: which model a name without a tag stands for, or "".
    """

    ref: ModelRef
    entry: CatalogEntry | None
    sources: tuple[Spec, ...]
    system: str | None
    settings: Mapping[str, Any]
    note: str = ""


def resolve_ref(text: str, config: Config) -> ResolvedRef:
    """Look up a model name and replace aliases by their targets. The system text and the settings
    of an alias override those of its target. Raises UserError if there is no such model, or if
    aliases form a circle.
    """
    entries = catalog.load_catalog(config)
    system: str | None = None
    settings: dict[str, Any] = {}
    outermost: CatalogEntry | None = None
    aliases: list[str] = []
    note = ""
    while True:
        ref = parse_ref(text, entries, config)
        note = note or describe_default(ref, entries)
        entry = entries[ref.name] if ref.kind == "catalog" else None
        outermost = outermost or entry
        if entry:
            system = entry.system if system is None else system
            settings = {**entry.settings, **settings}
        if entry is None or not entry.alias:
            return ResolvedRef(ref, outermost, _sources_of(ref, entry), system, settings, note)
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
    """Return the model called `text` if it is on this disk with this revision and kind of source,
    otherwise None. Never uses the network. Prints which model a name without a tag stands for.
    Raises UserError for an unknown name.
    """
    resolved = resolve_ref(text, config)
    if resolved.note:
        watcher.note(resolved.note)
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
    """Return the model called `ref`. Download it if it is not on this disk.

    - `revision`: branch, tag or commit on the hub; `source`: kind of source, such as "hub". If they
      are set, a model on this disk is used only if it has both.
    - `force`: ask the hub for the newest commit of the revision, verify all files again, and
      download those that differ.

    Raises UserError if the name is unknown or every source fails.
    """
    resolved = resolve_ref(ref, config)
    if resolved.note and force:  # otherwise find_model has printed it
        watcher.note(resolved.note)
    if resolved.ref.kind == "path":
        return _model_at_path(resolved, config, watcher)
    specs = allowed_sources(resolved, revision, source)
    if not force and (model := find_local(resolved, config, watcher, revision, source)):
        return model  # nothing is downloaded, so no lock is needed
    with file_lock.hold_lock(
        store.lock_path(config, resolved.ref.name), watcher, resolved.ref.name
    ):
        if not force and (model := find_local(resolved, config, watcher, revision, source)):
            return model
        spec, fetched = _fetch_first(resolved, specs, config, watcher)
        if force and fetched.hub_error:
            raise fetched.hub_error
        name = (
            resolved.ref.full_name
            if resolved.ref.kind == "hub" and fetched.kind == "gguf"
            else resolved.ref.name
        )
        before = store.load_manifest(config, name)
        is_same = before is not None and before.revision == fetched.revision
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
                companions=before.companions if before and is_same else {},
            ),
        )
    return build_model(resolved, manifest)


def register_local(ref: str, config: Config, watcher: ProgressDisplay) -> FetchedModel:
    """Add a file or folder on this disk to the store: hash its files and write a manifest. The
    files stay where they are. Raises UserError if there is no readable model at this path.
    """
    resolved = resolve_ref(ref, config)
    if not (manifest := store.load_unchanged(config, resolved.ref.name, watcher)):
        model = _model_at_path(resolved, config, watcher)
        _check_readable(model.kind, model.path)  # before the hashing, which is slow
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


def _sources_of(ref: ModelRef, entry: CatalogEntry | None) -> tuple[Spec, ...]:
    """Return the sources of a model: those of its catalog entry, its repository, or its path."""
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
    """Return a model whose name is already resolved, as find_model does."""
    if resolved.ref.kind == "path":
        return _model_at_path(resolved, config, watcher)
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
            return None  # the GGUF on this disk is of the same repository, but of another type
    if manifest is None or (revision and revision not in (manifest.revision, manifest.requested)):
        return None
    if source and not manifest.source.startswith(f"{source}:"):
        return None
    return build_model(resolved, manifest)


def _model_at_path(resolved: ResolvedRef, config: Config, watcher: ProgressDisplay) -> FetchedModel:
    """Return the model at a path. Its files are not hashed, because that would delay the start. The
    sha256 is set only if the model was pulled before and has not changed.
    """
    path = Path(resolved.ref.name)
    kind, files = find_model_files(path)
    manifest = store.load_manifest(config, resolved.ref.name)
    is_hashed = manifest is not None and all(file.is_unchanged for file in manifest.files)
    return _apply_defaults(
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
    """Return the sources of a model that have the kind `source` and support `revision`, which is
    set in them. None allows all. Raises UserError if no source remains.
    """
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


def _fetch_first(
    resolved: ResolvedRef, specs: list[Spec], config: Config, watcher: ProgressDisplay
) -> tuple[Spec, FetchedFiles]:
    """Fetch a model from the first source that succeeds, and print a note about each source that
    fails. Return the source and the files. Raises UserError if all sources fail.
    """
    failures: list[UserError] = []
    for spec in specs:
        if spec.note:
            watcher.note(f"trying {spec.label}: {spec.note}")
        try:
            fetched = SOURCES[spec.kind].fetch(
                spec, store.model_folder(config, resolved.ref.name), config, watcher
            )
            _check_readable(fetched.kind, fetched.path)
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


def _check_readable(kind: str, path: Path) -> None:
    """Raise UserError if a GGUF is incomplete or invalid. Checkpoint folders are not checked."""
    if kind == "gguf":
        from quant.model_file import read_header

        read_header.read_header(path)


def build_model(resolved: ResolvedRef, manifest: Manifest) -> FetchedModel:
    """Return the model that a manifest describes, with the defaults of the resolved name."""
    return _apply_defaults(
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


def _apply_defaults(resolved: ResolvedRef, model: FetchedModel) -> FetchedModel:
    """Return `model` with the type to quantize to, the system text and the settings, which are
    determined by the typed name and its catalog entry.
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
