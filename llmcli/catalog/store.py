"""The store: records which models are on this disk, and where.

data/models/NAME/manifest.json records the files of a fetched model. These can be in the same
folder, in the Hugging Face cache or anywhere else. data/models/NAME/TYPE/ contains a model that
llmcli has quantized from it, with its own manifest.json.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

from llmcli.atomic_files import CHUNK_BYTES, write_atomically
from llmcli.config import Config
from llmcli.types import ProgressDisplay
from quant.json_dataclasses import read_json

MAX_MANIFEST_BYTES = 1 << 24  # a manifest has about 300 bytes for each file of the model


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """A file on this disk with its sha256. `bytes`, `mtime_ns`: its size, and its modification time
    in nanoseconds, when it was hashed.
    """

    path: str
    bytes: int
    sha256: str
    mtime_ns: int

    @property
    def is_unchanged(self) -> bool:
        """Whether the file still has the size and the modification time that it had when hashed."""
        try:
            now = Path(self.path).stat()
        except OSError:
            return False
        return now.st_size == self.bytes and now.st_mtime_ns == self.mtime_ns


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one model on this disk, which is stored as manifest.json.

    - `kind`, `path`: a GGUF (its first shard), or the folder of a float checkpoint.
    - `files`: all files of the model.
    - `source`: where they are from, such as `hub:org/repo`.
    - `requested`: the requested revision; `revision`: the commit that it pointed to.
    - `derived_from`, `file_type`, `settings`: only for a quantized model: the name of the original
      model, the type, and how it was quantized.
    - `created`: UTC time.
    - `companions`: files that belong to the model but are not loaded with it, by kind ("mmproj").
      They are not part of `bytes` and `sha256`.
    """

    name: str
    kind: Literal["gguf", "folder"]
    path: str
    files: tuple[VerifiedFile, ...]
    source: str
    revision: str | None = None
    requested: str | None = None
    derived_from: str | None = None
    file_type: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    companions: Mapping[str, VerifiedFile] = field(default_factory=dict)

    @property
    def all_files(self) -> tuple[VerifiedFile, ...]:
        """The files of the model and its companions."""
        return (*self.files, *self.companions.values())

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """The sha256 of the files (`combine_hashes`)."""
        return combine_hashes([(Path(file.path).name, file.sha256) for file in self.files])


def combine_hashes(hashes: Sequence[tuple[str, str]]) -> str:
    """Return the sha256 of a model from the name and the sha256 of each of its files: that of the
    file, or for several files that of a text with one line `SHA256  NAME` for each, as sha256sum
    prints it.
    """
    if len(hashes) == 1:
        return hashes[0][1]
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in hashes)
    return hashlib.sha256(lines.encode()).hexdigest()


def models_folder(config: Config) -> Path:
    """Return the folder of the store, which contains one folder for each model."""
    return config.data / "models"


def model_folder(config: Config, name: str) -> Path:
    """Return the folder of the model `name` in the store. If `name` is an absolute path, the name
    of the folder consists of the file's stem and a hash of the path.
    """
    if name.startswith("/"):
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return models_folder(config) / f"local-{quote(Path(name).stem, safe='')[:80]}-{digest}"
    return models_folder(config) / quote(name, safe="")


class OriginalModel(Protocol):
    """A model from which another model is quantized. FetchedModel has these properties."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def revision(self) -> str | None: ...


def quantized_path(config: Config, model: OriginalModel, file_type: str) -> Path:
    """Return the path of the GGUF that is or will be quantized from `model` to `file_type`."""
    return (
        quantized_folder(config, model.name, file_type)
        / f"{_file_stem(model.name)}-{file_type}.gguf"
    )


def quantized_folder(config: Config, name: str, file_type: str) -> Path:
    """Return the folder of the GGUF that is quantized from the model `name` to `file_type`."""
    return model_folder(config, name) / file_type


def _file_stem(name: str) -> str:
    """Return a model name as the first part of a file name: without a path, `/` and `:`."""
    return quote(
        Path(name).stem if name.startswith("/") else name.replace("/", "-").replace(":", "-"),
        safe="",
    )


def load_manifest(config: Config, name: str) -> Manifest | None:
    """Return the manifest of the model `name`, or None if it is missing or invalid."""
    return read_manifest(model_folder(config, name) / "manifest.json")


def load_quantized(config: Config, model: OriginalModel, file_type: str) -> Manifest | None:
    """Return the manifest of the GGUF on this disk that was quantized from `model` to `file_type`.
    Return None if there is none, if it was quantized from other content, or if its files have
    changed. Also return None if `model` has no sha256 (see FetchedModel).
    """
    manifest = read_manifest(quantized_path(config, model, file_type).with_name("manifest.json"))
    if (
        manifest is None
        or not model.sha256
        or manifest.settings.get("source_sha256") != model.sha256
    ):
        return None
    return manifest if all(file.is_unchanged for file in manifest.files) else None


def save_manifest(config: Config, manifest: Manifest) -> Manifest:
    """Write the manifest of a fetched model, which adds the model to the store. Return the manifest
    with its time of creation.
    """
    manifest = replace(manifest, created=manifest.created or _utc_now())
    _write_manifest(model_folder(config, manifest.name) / "manifest.json", manifest)
    return manifest


def record_quantized(
    config: Config, model: OriginalModel, file_type: str, settings: Mapping[str, Any] | None = None
) -> Manifest:
    """Write the manifest of the finished GGUF at quantized_path(config, model, file_type), and
    return it. `settings`: how the GGUF was quantized.
    """
    path = quantized_path(config, model, file_type)
    manifest = Manifest(
        name=f"{model.name}:{file_type}",
        kind="gguf",
        path=str(path),
        files=(hash_file(path),),
        source=f"quantized:{model.name}",
        revision=model.revision,
        derived_from=model.name,
        file_type=file_type,
        settings={**(settings or {}), "source_sha256": model.sha256},
        created=_utc_now(),
    )
    _write_manifest(path.with_name("manifest.json"), manifest)
    return manifest


def remote_quantizations(config: Config, name: str) -> list[Manifest]:
    """Return the manifests of the models that were quantized from the remote checkpoint `name` and
    whose files have not changed.
    """
    manifests = (
        read_manifest(path) for path in sorted(model_folder(config, name).glob("*/manifest.json"))
    )
    return [
        manifest
        for manifest in manifests
        if manifest
        and manifest.settings.get("straight")
        and all(file.is_unchanged for file in manifest.files)
    ]


def list_manifests(config: Config) -> list[Manifest]:
    """Return the manifests of all fetched and quantized models, sorted by name."""
    all_manifests = [
        read_manifest(path)
        for depth in ("*", "*/*")
        for path in models_folder(config).glob(f"{depth}/manifest.json")
    ]
    return sorted(
        (manifest for manifest in all_manifests if manifest), key=lambda manifest: manifest.name
    )


def load_unchanged(config: Config, name: str, watcher: ProgressDisplay) -> Manifest | None:
    """Return the manifest of the model `name` if all its files exist and are unchanged, otherwise
    None. A file with another modification time is hashed. If its content has not changed, the new
    time is stored in the manifest.
    """
    manifest = load_manifest(config, name)
    if manifest is None and (path := model_folder(config, name) / "manifest.json").exists():
        watcher.note(f"{path} is damaged, and is written again")
    if manifest is None or all(file.is_unchanged for file in manifest.files):
        return manifest
    files = []
    for file in manifest.files:
        path = Path(file.path)
        if not path.is_file() or path.stat().st_size != file.bytes:
            return None
        current = file if file.is_unchanged else hash_file(path, watcher)
        if current.sha256 != file.sha256:
            watcher.note(f"{path} has changed since it was fetched")
            return None
        files.append(current)
    manifest = replace(manifest, files=tuple(files))
    _write_manifest(model_folder(config, name) / "manifest.json", manifest)
    return manifest


def hash_file(path: Path, watcher: ProgressDisplay | None = None) -> VerifiedFile:
    """Hash a file and return it with its sha256. `watcher`: shows the progress; None hides it."""
    before = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if watcher is None:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        else:
            with watcher.bar(f"checking {path.name}", before.st_size) as bar:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    bar.advance(len(chunk))
    return VerifiedFile(str(path), before.st_size, digest.hexdigest(), before.st_mtime_ns)


def describe_file(path: Path, sha256: str) -> VerifiedFile:
    """Return a file with its already known `sha256`, which is not computed again."""
    status = path.stat()
    return VerifiedFile(str(path), status.st_size, sha256, status.st_mtime_ns)


def lock_path(config: Config, name: str) -> Path:
    """Return the path of the lock file of the model `name`. It is locked while the model is
    downloaded or removed.
    """
    return models_folder(config) / ".locks" / f"{model_folder(config, name).name}.lock"


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest in the file `path`, or None if it is missing or invalid."""
    try:
        manifest = read_json(Manifest, path, MAX_MANIFEST_BYTES)
    except (OSError, ValueError):
        return None  # `gc` lists invalid manifests
    paths = (manifest.path, *(file.path for file in manifest.all_files))
    is_valid = manifest.files and all(name.startswith("/") and "\0" not in name for name in paths)
    return manifest if is_valid else None


def _write_manifest(path: Path, manifest: Manifest) -> None:
    write_atomically(path, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def _utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
