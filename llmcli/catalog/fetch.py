"""From a name to a model on this disk: what is here is used, what is not is fetched.

The one way in for every command. It knows the order of things (catalog, store, sources) and leaves
the doing to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llmcli.catalog import catalog, store
from llmcli.catalog.catalog import Entry, Spec
from llmcli.catalog.ref import Ref, parse, type_name
from llmcli.catalog.sources import SOURCES
from llmcli.catalog.sources.base import Fetched
from llmcli.catalog.sources.local import contents
from llmcli.catalog.store import Manifest
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import Watcher
from quant.blob import Blob
from quant.errors import Refusal


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is here. `path` is the GGUF to load (of a split one the first shard), or the
    folder of a float checkpoint, where `quant` says what it should become; for a GGUF `quant` is
    None unless the name asked for another type. `sha256` is empty for a file named by its path and
    never pulled. Of a checkpoint that stays where it is, `blobs` are the safetensors, and `record`
    is what the store should know of whatever is made of it.
    """

    name: str
    path: Path
    kind: Literal["gguf", "folder"]
    bytes: int
    sha256: str
    source: str
    revision: str | None = None
    quant: str | None = None
    entry: Entry | None = None
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, Blob] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a name stands for once aliases are followed: where it may come from, and its defaults."""

    ref: Ref
    entry: Entry | None
    sources: tuple[Spec, ...]
    system: str | None
    settings: Mapping[str, Any]


def resolve(text: str, config: Config) -> Wanted:
    """Follow a name through the catalog; an alias's own system prompt and settings win."""
    entries = catalog.load(config)
    system: str | None = None
    settings: dict[str, Any] = {}
    outermost: Entry | None = None
    seen: list[str] = []
    while True:
        ref = parse(text, entries, config)
        entry = entries[ref.name] if ref.kind == "catalog" else None
        outermost = outermost or entry
        if entry:
            system = entry.system if system is None else system
            settings = {**entry.settings, **settings}
        if entry is None or not entry.alias:
            return Wanted(ref, outermost, _sources(ref, entry), system, settings)
        seen.append(entry.name)
        text = entry.alias if ref.quant is None else f"{entry.alias}:{ref.quant}"
        if entry.alias in seen:
            raise UserError(
                f"{' -> '.join([*seen, entry.alias])} is a circle of aliases",
                hint=f"correct {entry.origin}",
            )


def find(
    text: str,
    config: Config,
    watcher: Watcher,
    *,
    revision: str | None = None,
    source: str | None = None,
) -> Model | None:
    """The model if it is here, without any network; None if it would have to be fetched."""
    wanted = resolve(text, config)
    return here(wanted, config, watcher, revision, source)


def obtain(
    ref: str,
    config: Config,
    watcher: Watcher,
    *,
    revision: str | None = None,
    source: str | None = None,
    force: bool = False,
) -> Model:
    """The model called `ref`, fetched if it is not here.

    `revision` (hub only) and `source` (a kind of source) must fit what is here, or it is fetched;
    `force` resolves and verifies again, and fetches what does not match. Raises UserError.
    """
    wanted = resolve(ref, config)
    if wanted.ref.kind == "path":
        return _local(wanted, config, watcher)
    specs = allowed(wanted, revision, source)
    if not force and (model := here(wanted, config, watcher, revision, source)):
        return model  # nobody waits for a lock who has nothing to fetch
    with store.locked(store.lock_file(config, wanted.ref.name), watcher, wanted.ref.name):
        if not force and (model := here(wanted, config, watcher, revision, source)):
            return model
        spec, fetched = _first(wanted, specs, config, watcher)
        name = (
            wanted.ref.full
            if wanted.ref.kind == "hub" and fetched.kind == "gguf"
            else wanted.ref.name
        )
        manifest = store.save(
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
    return model_of(wanted, manifest)


def register(ref: str, config: Config, watcher: Watcher) -> Model:
    """Hash a file or folder that stays where it is, and list it."""
    wanted = resolve(ref, config)
    if not (manifest := store.present(config, wanted.ref.name, watcher)):
        here = _local(wanted, config, watcher)
        _readable(here.kind, here.path)  # before the long look at every byte
        spec = Spec("local", path=wanted.ref.name)
        fetched = SOURCES["local"].fetch(
            spec, store.folder(config, wanted.ref.name), config, watcher
        )
        manifest = store.save(
            config,
            Manifest(
                wanted.ref.name, fetched.kind, str(fetched.path), fetched.files, fetched.source
            ),
        )
    return model_of(wanted, manifest)


def _sources(ref: Ref, entry: Entry | None) -> tuple[Spec, ...]:
    if entry:
        return entry.sources
    if ref.kind == "hub":
        return (Spec("hub", repo=ref.name, quant=ref.quant or ""),)
    return (Spec("local", path=ref.name),)


def here(
    wanted: Wanted,
    config: Config,
    watcher: Watcher,
    revision: str | None = None,
    source: str | None = None,
) -> Model | None:
    """The model as it was fetched or named, if it is here and of this revision and source."""
    if wanted.ref.kind == "path":
        return _local(wanted, config, watcher)
    manifest = store.present(config, wanted.ref.full, watcher) if wanted.ref.kind == "hub" else None
    if manifest is None:
        manifest = store.present(config, wanted.ref.name, watcher)
        if manifest and wanted.ref.kind == "hub" and wanted.ref.quant and manifest.kind == "gguf":
            return None  # another type of the same repository
    if manifest is None or (revision and revision not in (manifest.revision, manifest.requested)):
        return None
    if source and not manifest.source.startswith(f"{source}:"):
        return None
    return model_of(wanted, manifest)


def _local(wanted: Wanted, config: Config, watcher: Watcher) -> Model:
    """A path is used as it is and not hashed: a model on a slow disk starts at once."""
    path = Path(wanted.ref.name)
    kind, files = contents(path)
    manifest = store.load(config, wanted.ref.name)
    known = manifest is not None and all(file.fresh for file in manifest.files)
    return _finish(
        wanted,
        Model(
            name=wanted.ref.name,
            path=path if kind == "folder" else files[0],
            kind=kind,
            source=f"local:{path}",
            bytes=sum(file.stat().st_size for file in files),
            sha256=manifest.sha256 if manifest and known else "",
        ),
    )


def allowed(wanted: Wanted, revision: str | None, source: str | None) -> list[Spec]:
    """The sources that can give what was asked for, with the revision filled in."""
    kinds = ", ".join(dict.fromkeys(spec.kind for spec in wanted.sources))
    specs = [spec for spec in wanted.sources if source in (None, spec.kind)]
    if not specs:
        raise UserError(
            f"{wanted.ref.name} has no source of kind {source!r}; it has {kinds}",
            hint="leave --source out",
        )
    if revision:
        specs = [replace(spec, revision=revision) for spec in specs if spec.kind == "hub"]
        if not specs:
            raise UserError(
                f"{wanted.ref.name} comes from {kinds}, which has no revisions",
                hint="leave --revision out",
            )
    return specs


def _first(
    wanted: Wanted, specs: list[Spec], config: Config, watcher: Watcher
) -> tuple[Spec, Fetched]:
    """The first source that delivers; each failure is one line."""
    failures: list[Refusal] = []
    for spec in specs:
        if spec.note:
            watcher.note(f"trying {spec.label}: {spec.note}")
        try:
            fetched = SOURCES[spec.kind].fetch(
                spec, store.folder(config, wanted.ref.name), config, watcher
            )
            _readable(fetched.kind, fetched.path)
            return spec, fetched
        except Refusal as error:
            failures.append(error)
            if len(specs) == 1:
                raise
            watcher.note(f"{spec.label}: {error}")
    reasons = "; ".join(
        f"{spec.label}: {error}" for spec, error in zip(specs, failures, strict=True)
    )
    raise UserError(
        f"no source of {wanted.ref.name} delivered it ({reasons})",
        hint=next((error.hint for error in failures if error.hint), ""),
    )


def _readable(kind: str, path: Path) -> None:
    """Refuse a file that is not a whole GGUF before it is listed."""
    if kind == "gguf":
        from quant import container

        container.read(path)


def model_of(wanted: Wanted, manifest: Manifest) -> Model:
    """What the store and the catalog know, together."""
    return _finish(
        wanted,
        Model(
            name=manifest.name,
            path=Path(manifest.path),
            kind=manifest.kind,
            bytes=manifest.bytes,
            sha256=manifest.sha256,
            source=manifest.source,
            revision=manifest.revision,
        ),
    )


def _finish(wanted: Wanted, model: Model) -> Model:
    """Add what the catalog says: the type a checkpoint becomes, the system prompt, the settings."""
    asked = wanted.ref.quant if not (wanted.ref.kind == "hub" and model.kind == "gguf") else None
    default = (wanted.entry.quant if wanted.entry else "Q4_K_M") if model.kind == "folder" else None
    quant = asked or default
    return replace(
        model,
        quant=type_name(quant) if quant else None,
        entry=wanted.entry,
        system=wanted.system,
        settings=wanted.settings,
    )
