"""The models that a server offers: those on this disk, and those of the tables `[serve."NAME"]`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.catalog import catalog, fetch, store
from llmcli.catalog.model_facts import read_facts
from llmcli.catalog.serve_table import ServeEntry, load_serve_table
from llmcli.errors import UserError
from llmcli.model_loader.installed_model import installed_model
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
    - `keep_alive`: seconds for which it stays loaded; None: as the server says.
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
        """What the file's header says; empty if it cannot be read."""
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
    """Return the models that a server offers, by name. `refs`: only these; empty: all models on this
    disk, and those of `[serve]`. `request`: the options of the command line. Nothing is downloaded.

    Raises UserError if the catalog is wrong, or if two models have the same name.
    """
    config, ui, refs = request.config, request.ui, tuple(refs)
    table = load_serve_table(config)
    entries = [table.get(ref) or _entry_of_ref(ref) for ref in refs]
    if not refs:
        entries = list(table.values())
        known = {entry.name for entry in entries} | {entry.model_ref for entry in entries}
        entries += [ServeEntry(name) for name in _names_on_disk(config) if name not in known]
    models = {
        entry.name: model
        for entry in entries
        if (model := _served_model(entry, request, config, ui)).path or refs or entry.name in table
    }
    _check_names(models, config)
    return models


def _entry_of_ref(ref: str) -> ServeEntry:
    """Return the entry of a REF of the command line. A file is named without its folder and suffix."""
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


def _served_model(
    entry: ServeEntry, request: ServeRequest, config: "Config", ui: "UI"
) -> ServedModel:
    """Return the model of an entry. Its `path` is None if it is not on this disk as a GGUF."""
    path, nbytes = None, 0
    try:
        resolved = fetch.resolve_ref(entry.model_ref, config)
        model = installed_model(resolved, config, ui, entry.model_ref)
    except UserError:  # the name is unknown, or the file is damaged
        model = None
    if model is not None and model.kind == "gguf" and model.path.is_file():
        path, nbytes = model.path, model.nbytes
    return ServedModel(
        names=tuple(dict.fromkeys((entry.name, *entry.aliases))),
        path=path,
        nbytes=nbytes,
        request=_request_of_entry(entry, request),
        is_pinned=entry.pin,
        keep_alive=entry.keep_alive,
    )


def _request_of_entry(entry: ServeEntry, request: ServeRequest) -> ServeRequest:
    """Return the request that opens the model of an entry: the server's with the entry's settings."""
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


def _check_names(models: Mapping[str, ServedModel], config: "Config") -> None:
    """Raise UserError if two models have the same name."""
    owners: dict[str, str] = {}
    for model in models.values():
        for name in model.names:
            other = owners.setdefault(name.lower(), model.name)
            if other != model.name:
                raise UserError(
                    f"{name} is a name of both {other} and {model.name}",
                    hint=f"correct the aliases in {config.user_catalog}",
                )


def match_name(requested: str, models: Mapping[str, ServedModel]) -> str | None:
    """Return the name of the model that a request names; None if there is none. Upper and lower case
    are equal, ollama's default tag is left out, and a name without a tag means the only model with it
    that is offered.
    """
    owners = {name.lower(): model.name for model in models.values() for name in model.names}
    wanted = requested.lower()
    bare = wanted.removesuffix(LATEST_TAG)
    for name in (wanted, bare):
        if name in owners:
            return owners[name]
    tagged = {owner for name, owner in owners.items() if name.partition(":")[0] == bare}
    return tagged.pop() if len(tagged) == 1 else None
