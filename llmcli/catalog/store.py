"""Where models live: a folder and a manifest each, a lock, and what may be thrown away.

data/models/NAME/manifest.json describes what was fetched (a file here, or files in the Hugging Face
cache); data/models/NAME/TYPE/ holds what we quantized from it. The store knows nothing of the
catalog and nothing of the network.
"""

import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

from llmcli.catalog.partial import CHUNK, cannot_write, make_folder, write_whole
from llmcli.config import Config
from llmcli.types import Watcher


@dataclass(frozen=True, slots=True)
class File:
    """One verified file: its size and time when its sha256 was taken."""

    path: str
    bytes: int
    sha256: str
    mtime_ns: int

    @property
    def fresh(self) -> bool:
        """Whether it is still as it was when it was hashed, as far as size and time tell."""
        try:
            now = Path(self.path).stat()
        except OSError:
            return False
        return now.st_size == self.bytes and now.st_mtime_ns == self.mtime_ns


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of one model on this disk.

    `path` is the file to load (the first shard) or the folder of a float checkpoint. `sha256` is
    the file's, or that of the lines `SHA256  NAME` of all files where there are several.
    `requested` is the revision that was asked for, `revision` the commit it was. A quantized one
    names its parent in `derived_from` and how it was made in `settings`.
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
    """The folder with one folder a model."""
    return config.data / "models"


def folder(config: Config, name: str) -> Path:
    """The folder of the model called `name`; an absolute path is shortened to its stem and a hash."""
    if name.startswith("/"):
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return root(config) / f"local-{quote(Path(name).stem, safe='')[:80]}-{digest}"
    return root(config) / quote(name, safe="")


class Original(Protocol):
    """What something can be quantized from: a fetched model."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def revision(self) -> str | None: ...


def derived_path(config: Config, model: Original, file_type: str) -> Path:
    """Where the quantization of `model` to `file_type` belongs; nothing is created."""
    return derived_folder(config, model.name, file_type) / f"{_stem(model.name)}-{file_type}.gguf"


def derived_folder(config: Config, name: str, file_type: str) -> Path:
    """The folder of one quantization of the model called `name`."""
    return folder(config, name) / file_type


def _stem(name: str) -> str:
    return quote(
        Path(name).stem if name.startswith("/") else name.replace("/", "-").replace(":", "-"),
        safe="",
    )


def load(config: Config, name: str) -> Manifest | None:
    """The manifest of `name`, None where there is none or where it cannot be read."""
    return read(folder(config, name) / "manifest.json")


def load_derived(config: Config, model: Original, file_type: str) -> Manifest | None:
    """The quantization of `model` that is here, made of exactly this content and unchanged since.

    None for a file that was only named by its path: quantizing itself tells whether that changed.
    """
    found = read(derived_path(config, model, file_type).with_name("manifest.json"))
    if found is None or not model.sha256 or found.settings.get("source_sha256") != model.sha256:
        return None
    return found if all(file.fresh for file in found.files) else None


def save(config: Config, manifest: Manifest) -> Manifest:
    """Write the manifest of a fetched model; from then on it is listed."""
    manifest = replace(manifest, created=manifest.created or _now())
    _write(folder(config, manifest.name) / "manifest.json", manifest)
    return manifest


def record_derived(
    config: Config, model: Original, file_type: str, settings: Mapping[str, Any] | None = None
) -> Manifest:
    """List the finished file at derived_path() as the quantization of `model` to `file_type`."""
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
    """The quantizations of `name` that were made straight from a server, whole and unchanged."""
    found = (read(path) for path in sorted(folder(config, name).glob("*/manifest.json")))
    return [
        made
        for made in found
        if made and made.settings.get("straight") and all(file.fresh for file in made.files)
    ]


def manifests(config: Config) -> list[Manifest]:
    """All that is listed, by name."""
    found = [
        read(path) for depth in ("*", "*/*") for path in root(config).glob(f"{depth}/manifest.json")
    ]
    return sorted((manifest for manifest in found if manifest), key=lambda manifest: manifest.name)


def present(config: Config, name: str, watcher: Watcher) -> Manifest | None:
    """The manifest of a model whose files are all here and unchanged.

    A file whose time changed is hashed again, once; one whose content changed is not present.
    """
    manifest = load(config, name)
    if manifest is None or all(file.fresh for file in manifest.files):
        return manifest
    files = []
    for file in manifest.files:
        path = Path(file.path)
        if not path.is_file() or path.stat().st_size != file.bytes:
            return None
        again = file if file.fresh else measure(path, watcher)
        if again.sha256 != file.sha256:
            watcher.note(f"{path} has changed since it was fetched")
            return None
        files.append(again)
    manifest = replace(manifest, files=tuple(files))
    _write(folder(config, name) / "manifest.json", manifest)
    return manifest


def measure(path: Path, watcher: Watcher | None = None) -> File:
    """Hash a file; what the manifest will say of it."""
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
    """What the manifest will say of a file that was hashed while it was written."""
    now = path.stat()
    return File(str(path), now.st_size, sha256, now.st_mtime_ns)


@contextmanager
def locked(path: Path, watcher: Watcher | None = None, what: str = "") -> Iterator[bool]:
    """Hold the lock file at `path`; yields False at once where it is held and there is no watcher.

    With a watcher it says that it waits, and waits. The kernel frees the lock of a dead process.
    """
    make_folder(path.parent)
    try:
        file = path.open("a")
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if watcher is None:
                yield False
                return
            watcher.note(f"another llmcli is at work on {what}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def lock_file(config: Config, name: str) -> Path:
    """The lock of the model called `name`."""
    return root(config) / ".locks" / f"{folder(config, name).name}.lock"


def read(path: Path) -> Manifest | None:
    """The manifest in one file; None where it is absent or broken."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(**{**table, "files": tuple(File(**file) for file in table["files"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or broken: gc finds the broken ones


def _write(path: Path, manifest: Manifest) -> None:
    write_whole(path, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
