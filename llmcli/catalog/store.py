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

from llmcli.atomic_files import CHUNK, write_whole
from llmcli.config import Config
from llmcli.types import Watcher


@dataclass(frozen=True, slots=True)
class File:
    """A verified file, with its size and modification time when it was hashed."""

    path: str
    bytes: int
    sha256: str
    mtime_ns: int

    @property
    def fresh(self) -> bool:
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
    - `requested`: the requested revision; `revision`: the commit it pointed to.
    - `derived_from`, `settings`: for a quantized model, the original and how it was made.
    """

    name: str
    kind: Literal["gguf", "folder"]
    path: str
    files: tuple[File, ...]
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


def root(config: Config) -> Path:
    """Return the folder that contains one folder for each model."""
    return config.data / "models"


def folder(config: Config, name: str) -> Path:
    """Return the folder of the model `name`. An absolute path becomes its stem and a hash."""
    if name.startswith("/"):
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return root(config) / f"local-{quote(Path(name).stem, safe='')[:80]}-{digest}"
    return root(config) / quote(name, safe="")


class Original(Protocol):
    """A fetched model, from which others can be quantized."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def revision(self) -> str | None: ...


def derived_path(config: Config, model: Original, file_type: str) -> Path:
    """Return the path for `model` quantized to `file_type`; nothing is created."""
    return derived_folder(config, model.name, file_type) / f"{_stem(model.name)}-{file_type}.gguf"


def derived_folder(config: Config, name: str, file_type: str) -> Path:
    """Return the folder for the model `name` quantized to `file_type`."""
    return folder(config, name) / file_type


def _stem(name: str) -> str:
    return quote(
        Path(name).stem if name.startswith("/") else name.replace("/", "-").replace(":", "-"),
        safe="",
    )


def load(config: Config, name: str) -> Manifest | None:
    """Return the manifest of `name`, or None if it is missing or broken."""
    return read(folder(config, name) / "manifest.json")


def load_derived(config: Config, model: Original, file_type: str) -> Manifest | None:
    """Return the quantization of `model` on this disk, if made from exactly this content.

    Returns None for a model without a sha256 (a file named by its path); quantizing then checks
    whether the file changed.
    """
    manifest = read(derived_path(config, model, file_type).with_name("manifest.json"))
    if (
        manifest is None
        or not model.sha256
        or manifest.settings.get("source_sha256") != model.sha256
    ):
        return None
    return manifest if all(file.fresh for file in manifest.files) else None


def save(config: Config, manifest: Manifest) -> Manifest:
    """Write the manifest of a fetched model, which is listed from now on."""
    manifest = replace(manifest, created=manifest.created or _now())
    _write(folder(config, manifest.name) / "manifest.json", manifest)
    return manifest


def record_derived(
    config: Config, model: Original, file_type: str, settings: Mapping[str, Any] | None = None
) -> Manifest:
    """Record the finished file at derived_path() as `model` quantized to `file_type`."""
    path = derived_path(config, model, file_type)
    manifest = Manifest(
        name=f"{model.name}:{file_type}",
        kind="gguf",
        path=str(path),
        files=(measure(path),),
        source=f"quantized:{model.name}",
        revision=model.revision,
        derived_from=model.name,
        file_type=file_type,
        settings={**(settings or {}), "source_sha256": model.sha256},
        created=_now(),
    )
    _write(path.with_name("manifest.json"), manifest)
    return manifest


def straight(config: Config, name: str) -> list[Manifest]:
    """Return the complete and unchanged models that were quantized from a remote checkpoint."""
    manifests = (read(path) for path in sorted(folder(config, name).glob("*/manifest.json")))
    return [
        manifest
        for manifest in manifests
        if manifest
        and manifest.settings.get("straight")
        and all(file.fresh for file in manifest.files)
    ]


def manifests(config: Config) -> list[Manifest]:
    """Return all manifests, sorted by name."""
    all_manifests = [
        read(path) for depth in ("*", "*/*") for path in root(config).glob(f"{depth}/manifest.json")
    ]
    return sorted(
        (manifest for manifest in all_manifests if manifest), key=lambda manifest: manifest.name
    )


def present(config: Config, name: str, watcher: Watcher) -> Manifest | None:
    """Return the manifest of a model whose files all exist and are unchanged, else None.

    A file with a new modification time is hashed again once.
    """
    manifest = load(config, name)
    if manifest is None or all(file.fresh for file in manifest.files):
        return manifest
    files = []
    for file in manifest.files:
        path = Path(file.path)
        if not path.is_file() or path.stat().st_size != file.bytes:
            return None
        current = file if file.fresh else measure(path, watcher)
        if current.sha256 != file.sha256:
            watcher.note(f"{path} has changed since it was fetched")
            return None
        files.append(current)
    manifest = replace(manifest, files=tuple(files))
    _write(folder(config, name) / "manifest.json", manifest)
    return manifest


def measure(path: Path, watcher: Watcher | None = None) -> File:
    """Hash a file; return its manifest record."""
    before = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if watcher is None:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        else:
            with watcher.bar(f"checking {path.name}", before.st_size) as bar:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    bar.advance(len(chunk))
    return File(str(path), before.st_size, digest.hexdigest(), before.st_mtime_ns)


def recorded(path: Path, sha256: str) -> File:
    """Return the manifest record of a file that was hashed while it was written."""
    status = path.stat()
    return File(str(path), status.st_size, sha256, status.st_mtime_ns)


def lock_file(config: Config, name: str) -> Path:
    """Return the lock file of the model `name`."""
    return root(config) / ".locks" / f"{folder(config, name).name}.lock"


def read(path: Path) -> Manifest | None:
    """Read a manifest; return None if it is missing or broken."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(**{**table, "files": tuple(File(**file) for file in table["files"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # `gc` reports the broken ones


def _write(path: Path, manifest: Manifest) -> None:
    write_whole(path, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
