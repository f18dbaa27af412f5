"""The models on this disk: folders, manifests and locks.

data/models/NAME/manifest.json describes a fetched model (local files, or files in the Hugging Face
cache). data/models/NAME/TYPE/ contains a model that llmcli quantized from it.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

from llmcli.atomic_files import CHUNK_BYTES, write_atomically
from llmcli.config import Config
from llmcli.types import ProgressDisplay


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """A file on this disk: its sha256, and its size and modification time when it was hashed."""

    path: str
    bytes: int
    sha256: str
    mtime_ns: int

    @property
    def is_unchanged(self) -> bool:
        """Whether size and modification time are still the same as when the file was hashed."""
        try:
            now = Path(self.path).stat()
        except OSError:
            return False
        return now.st_size == self.bytes and now.st_mtime_ns == self.mtime_ns


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one model on this disk.

    - `path`: the file to load (the first shard), or the folder of a float checkpoint.
    - `sha256`: the file's hash; for several files, the hash of their lines `SHA256  NAME`.
    - `requested`: the revision that was requested; `revision`: the commit that it pointed to.
    - `derived_from`: for a quantized model, the model that it was made from; `settings`: how it was
      made.
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

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def sha256(self) -> str:
        if len(self.files) == 1:
            return self.files[0].sha256
        lines = "".join(f"{file.sha256}  {Path(file.path).name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()


def models_folder(config: Config) -> Path:
    """Return the folder that contains one folder for each model."""
    return config.data / "models"


def model_folder(config: Config, name: str) -> Path:
    """Return the folder of the model `name`; for an absolute path, it is named by stem and hash."""
    if name.startswith("/"):
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return models_folder(config) / f"local-{quote(Path(name).stem, safe='')[:80]}-{digest}"
    return models_folder(config) / quote(name, safe="")


class OriginalModel(Protocol):
    """A fetched model, from which other models can be quantized."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def revision(self) -> str | None: ...


def quantized_path(config: Config, model: OriginalModel, file_type: str) -> Path:
    """Return the path for `model` quantized to `file_type`; nothing is created."""
    return quantized_folder(config, model.name, file_type) / f"{_stem(model.name)}-{file_type}.gguf"


def quantized_folder(config: Config, name: str, file_type: str) -> Path:
    """Return the folder for the model `name` quantized to `file_type`."""
    return model_folder(config, name) / file_type


def _stem(name: str) -> str:
    return quote(
        Path(name).stem if name.startswith("/") else name.replace("/", "-").replace(":", "-"),
        safe="",
    )


def load_manifest(config: Config, name: str) -> Manifest | None:
    """Return the manifest of `name`, or None if it is missing or broken."""
    return read_manifest(model_folder(config, name) / "manifest.json")


def load_quantized(config: Config, model: OriginalModel, file_type: str) -> Manifest | None:
    """Return the quantization of `model` on this disk, if it was made from exactly this content.

    Returns None for a model without a sha256 (a file named by its path): quantizing it then checks
    whether the file has changed.
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
    """Write the manifest of a fetched model; `llmcli list` shows the model from then on."""
    manifest = replace(manifest, created=manifest.created or _now())
    _write(model_folder(config, manifest.name) / "manifest.json", manifest)
    return manifest


def record_quantized(
    config: Config, model: OriginalModel, file_type: str, settings: Mapping[str, Any] | None = None
) -> Manifest:
    """Record the finished file at `quantized_path()` as `model` quantized to `file_type`."""
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
        created=_now(),
    )
    _write(path.with_name("manifest.json"), manifest)
    return manifest


def remote_quantizations(config: Config, name: str) -> list[Manifest]:
    """Return the complete and unchanged models that were quantized from a remote checkpoint."""
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
    """Return all manifests, sorted by name."""
    all_manifests = [
        read_manifest(path)
        for depth in ("*", "*/*")
        for path in models_folder(config).glob(f"{depth}/manifest.json")
    ]
    return sorted(
        (manifest for manifest in all_manifests if manifest), key=lambda manifest: manifest.name
    )


def load_unchanged(config: Config, name: str, watcher: ProgressDisplay) -> Manifest | None:
    """Return the manifest of a model whose files all exist and are unchanged, else None.

    A file with a new modification time is hashed again; if its content is the same, the manifest is
    updated.
    """
    manifest = load_manifest(config, name)
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
    _write(model_folder(config, name) / "manifest.json", manifest)
    return manifest


def hash_file(path: Path, watcher: ProgressDisplay | None = None) -> VerifiedFile:
    """Hash a file; return its manifest record."""
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
    """Return the manifest record of a file that was hashed while it was written."""
    status = path.stat()
    return VerifiedFile(str(path), status.st_size, sha256, status.st_mtime_ns)


def lock_path(config: Config, name: str) -> Path:
    """Return the lock file of the model `name`."""
    return models_folder(config) / ".locks" / f"{model_folder(config, name).name}.lock"


def read_manifest(path: Path) -> Manifest | None:
    """Read a manifest; return None if it is missing or broken."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(
            **{**table, "files": tuple(VerifiedFile(**file) for file in table["files"])}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # `gc` reports the broken ones


def _write(path: Path, manifest: Manifest) -> None:
    write_atomically(path, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
