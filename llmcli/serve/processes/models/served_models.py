"""The models that a server offers: those on this disk, and those of the tables `[serve."NAME"]`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.catalog import catalog, fetch, store
from llmcli.catalog.fetch import FetchedModel
from llmcli.catalog.model_facts import read_facts
from llmcli.catalog.serve_table import ServeEntry, load_serve_table
from llmcli.errors import UserError
from llmcli.model_loader.installed_model import installed_model
from llmcli.model_loader.prepare import catalog_type
from llmcli.runtime.draft_settings import parse_method
from llmcli.serve.serve_request import ServeRequest

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI

LATEST_TAG = ":latest"  # the tag that ollama adds to a name without one
TYPED_OPTIONS = ("ctx_size", "threads", "cache_type_k", "cache_type_v", "gpu_layers")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes when a file is replaced."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server offers.

    - `names`: its name and its further names.
    - `path`: its file, the first shard; None if it is not on this disk.
    - `nbytes`: of its files.
    - `request`: how its process opens it.
    - `keep_alive`: seconds for which it stays loaded; None: the server's default.
    """

    names: tuple[str, ...]
    path: Path | None
    nbytes: int
    request: ServeRequest
    is_pinned: bool = False
    keep_alive: float | None = None

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def stamp(self) -> FileStamp | None:
        """The present state of the file; None if it is gone."""
        return file_stamp(self.path) if self.path else None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the file's header; empty if it cannot be read."""
        if self.path is None or (stamp := self.stamp) is None:
            return {}
        return _facts_of_file(self.path, stamp)


def file_stamp(path: Path) -> FileStamp | None:
    """Return the stamp of a file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@cache
def _facts_of_file(path: Path, stamp: FileStamp) -> Mapping[str, Any]:
    """Return the facts of a file in the state `stamp`."""
    try:
        return read_facts("gguf", path)
    except (UserError, OSError):
        return {}


def find_served_models(refs: Iterable[str], request: ServeRequest) -> dict[str, ServedModel]:
    """Return the models that a server offers, by name. `refs`: only these; empty: all models on
    this disk, and those of `[serve]`. `request`: the options of the command line. Nothing is
    downloaded.

    Raises UserError if the catalog is wrong, or if two models have the same name.
    """
    config, ui, refs = request.config, request.ui, tuple(dict.fromkeys(refs))
    table = load_serve_table(config)
    entries = [_entry_of_ref(ref, table) for ref in refs]
    if not refs:
        entries = list(table.values())
        known = {entry.name for entry in entries} | {entry.model_ref for entry in entries}
        entries += [ServeEntry(name) for name in _names_on_disk(config) if name not in known]
    found = [_find_model(entry, request, config, ui) for entry in entries]
    # without REFs, a model of the catalog that is not on this disk is not offered
    found = [one for one in found if one.model.path or refs or one.model.name in table]
    _check_names([one.model for one in found], config)
    return {model.name: model for model in _share_processes(found)}


def prepared_refs(refs: Iterable[str], config: "Config") -> list[str]:
    """Return the names of the models that the REFs of the command line stand for. Raises UserError
    if the catalog is wrong.
    """
    table = load_serve_table(config)
    return [_entry_of_ref(ref, table).model_ref for ref in refs]


def _entry_of_ref(ref: str, table: Mapping[str, ServeEntry]) -> ServeEntry:
    """Return the entry of a REF of the command line: that of `table`, or a new one. A file is named
    without its folder and suffix.
    """
    if ref in table:
        return table[ref]
    if not Path(ref).is_file():
        return ServeEntry(ref)
    return ServeEntry(Path(ref).stem, ref=ref, aliases=(ref,))


def _names_on_disk(config: "Config") -> list[str]:
    """Return the names of the models on this disk that can be loaded as they are, and of the user's
    aliases.
    """
    names = [
        manifest.name
        for manifest in store.list_manifests(config)
        if manifest.kind == "gguf" and Path(manifest.path).is_file()
    ]
    names += [name for name, entry in catalog.load_catalog(config).items() if entry.alias]
    return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class _FoundModel:
    """A model with its file on this disk. `file`: None if it is not here as a GGUF."""

    model: ServedModel
    file: FetchedModel | None

    def has_same_process(self, other: "_FoundModel") -> bool:
        """Return whether one process can answer for both: the file and all settings are equal."""
        if self.file is None or other.file is None or self.file.path != other.file.path:
            return False
        return _process_settings(self.model, self.file) == _process_settings(
            other.model, other.file
        )


def _process_settings(model: ServedModel, file: FetchedModel) -> tuple[Any, ...]:
    """Return all settings of a model's process besides the names."""
    request = replace(model.request, ref="", settings={**model.request.settings, "names": ()})
    try:
        file_type = catalog_type(file)
    except UserError:  # the file is damaged
        file_type = None
    draft = file.entry.draft if file.entry else ""
    profile = (file.system, dict(file.settings), draft, file_type)
    return request, model.is_pinned, model.keep_alive, profile


def _find_model(
    entry: ServeEntry, request: ServeRequest, config: "Config", ui: "UI"
) -> _FoundModel:
    """Return the model of an entry. Its `path` is None if it is not on this disk as a GGUF."""
    try:
        resolved = fetch.resolve_ref(entry.model_ref, config)
        file = installed_model(resolved, config, ui, entry.model_ref)
    except UserError:  # the name is unknown, or the file is damaged
        file = None
    if file is not None and not (file.kind == "gguf" and file.path.is_file()):
        file = None
    model = ServedModel(
        names=tuple(dict.fromkeys((entry.name, *entry.aliases))),
        path=file.path if file else None,
        nbytes=file.nbytes if file else 0,
        request=_request_of_entry(entry, request),
        is_pinned=entry.pin,
        keep_alive=entry.keep_alive,
    )
    return _FoundModel(model, file)


def _share_processes(found: Iterable[_FoundModel]) -> list[ServedModel]:
    """Return the models. Those that one process can answer for, such as a model and its alias
    without settings of its own, are one model with all their names, so that its weights are in
    memory once.
    """
    kept: list[_FoundModel] = []
    for one in found:
        same = [index for index, other in enumerate(kept) if one.has_same_process(other)]
        if same:
            kept[same[0]] = _with_names(kept[same[0]], one.model.names)
        else:
            kept.append(one)
    return [one.model for one in kept]


def _with_names(found: _FoundModel, further: tuple[str, ...]) -> _FoundModel:
    """Return a model with further names."""
    model = found.model
    names = (*model.names, *further)
    request = replace(model.request, settings={**model.request.settings, "names": names})
    return replace(found, model=replace(model, names=names, request=request))


def _request_of_entry(entry: ServeEntry, request: ServeRequest) -> ServeRequest:
    """Return the request that opens the model of an entry: the server's with the entry's
    settings.
    """
    typed = {name: value for name in TYPED_OPTIONS if (value := getattr(entry, name)) is not None}
    flags = request.run_flags
    changes: dict[str, Any] = {}
    if entry.draft is not None:
        changes["draft"] = parse_method(entry.draft)
    if entry.model_draft is not None:
        changes["model_draft"] = entry.model_draft
    if entry.system is not None:
        changes["system"] = entry.system
    flags = replace(
        flags,
        options=replace(flags.options, **typed),
        typed=flags.typed | frozenset(typed),
        **changes,
    )
    return replace(
        request,
        ref=entry.model_ref,
        run_flags=flags,
        parallel=entry.parallel or request.parallel,
        settings={**request.settings, "names": (entry.name, *entry.aliases)},
    )


def _check_names(models: Iterable[ServedModel], config: "Config") -> None:
    """Raise UserError if two models have the same name."""
    owners: dict[str, ServedModel] = {}
    for model in models:
        for name in model.names:
            other = owners.setdefault(name.lower(), model)
            if other is not model:
                raise UserError(
                    f"{name} is a name of both {other.request.ref} and {model.request.ref}",
                    hint=f"give one of them another name in {config.user_catalog}:"
                    ' [serve."NAME"] with `ref`',
                )


def match_name(requested: str, models: Mapping[str, ServedModel]) -> str | None:
    """Return the name of the model that a request names; None if there is none. Upper and lower
    case are equal, ollama's default tag is left out, and a name without a tag means the only model
    with it that is offered.
    """
    owners = {name.lower(): model.name for model in models.values() for name in model.names}
    wanted = requested.lower()
    bare = wanted.removesuffix(LATEST_TAG)
    for name in (wanted, bare):
        if name in owners:
            return owners[name]
    tagged = {owner for name, owner in owners.items() if name.partition(":")[0] == bare}
    return tagged.pop() if len(tagged) == 1 else None
