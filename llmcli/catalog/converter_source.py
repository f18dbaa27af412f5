"""llama.cpp's own converter of checkpoints, on this disk.

It is not in the wheel of llama-cpp-python, but in its source archive. The archive of the version
that llmcli requires is downloaded once, and the converter's files are unpacked to the cache.
"""

import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from llmcli.atomic_files import make_folder, write_error
from llmcli.catalog import pip_download
from llmcli.catalog.disk_space import require_free_space
from llmcli.catalog.pip_download import SourceArchive
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.file_lock import hold_lock
from llmcli.types import ProgressDisplay
from quant.native.ggml_contract import PACKAGE, PACKAGE_VERSION

# The archive of the version that llmcli requires. An upgrade changes the digest and the size, too.
ARCHIVE = SourceArchive(
    PACKAGE,
    PACKAGE_VERSION,
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "scikit_build_core.build",
    76_589_250,
)
CONVERT_SCRIPT, LORA_SCRIPT = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
CLASSES_FILE, MODULE_FOLDER = "conversion/__init__.py", "gguf-py"
NEEDED_FILES = (CONVERT_SCRIPT, LORA_SCRIPT, CLASSES_FILE, f"{MODULE_FOLDER}/gguf/__init__.py")
VENDORED_FOLDER = ("vendor", "llama.cpp")  # in the archive, below its only folder
MAX_FILES, MAX_FILE_BYTES, MAX_BYTES = 2000, 8 << 20, 64 << 20  # limits of what is unpacked
SCRATCH_PREFIX, LOCK_NAME = ".unpack-", "converter.lock"


def fetch_converter(config: Config, watcher: ProgressDisplay) -> Path:
    """Return the folder of the converter: the one that the user has set, or the one in the cache,
    where it is downloaded first if it is missing. Raises UserError if that fails.
    """
    if folder := find_converter(config):
        return folder
    with hold_lock(config.cache / LOCK_NAME, watcher, "llama.cpp's converter"):
        if folder := find_converter(config):
            return folder
        pip_download.require_pip(ARCHIVE.requirement, config)
        target = _cache_folder(config)
        make_folder(target.parent)
        for leftover in target.parent.glob(f"{SCRATCH_PREFIX}*"):  # of killed runs
            shutil.rmtree(leftover, ignore_errors=True)
        # pip downloads the archive, copies it, and unpacks it to read its metadata.
        require_free_space(6 * ARCHIVE.nbytes, target)
        with TemporaryDirectory(
            prefix=SCRATCH_PREFIX, dir=target.parent, ignore_cleanup_errors=True
        ) as scratch:
            label = f"llama.cpp's converter, in {ARCHIVE.requirement}"
            with watcher.bar(label, ARCHIVE.nbytes or None) as bar:
                archive = pip_download.download_source(ARCHIVE, Path(scratch), bar)
            unpacked = Path(scratch) / "converter"
            unpack_converter(archive, unpacked)
            shutil.rmtree(target, ignore_errors=True)  # of which files were deleted
            unpacked.replace(target)
    return target


def find_converter(config: Config) -> Path | None:
    """Return the folder of the converter if it is on this disk. Raises UserError if the user has
    set a folder without it.
    """
    if config.converter is not None:
        if missing := _missing_files(config.converter):
            raise UserError(
                f"LLMCLI_CONVERTER is {config.converter}, which has no {missing[0]}",
                hint="set it to a folder of llama.cpp's sources, or unset it",
            )
        return config.converter
    folder = _cache_folder(config)
    return None if _missing_files(folder) else folder


def describe_converter(config: Config) -> str:
    """Return the version of the converter as text; its folder if the user has set one."""
    return str(config.converter) if config.converter else ARCHIVE.requirement


def released_version(config: Config) -> str:
    """Return the version of the converter, as it is written into files; "another" if the user has
    set a folder, whose path belongs in no file.
    """
    return "another" if config.converter else ARCHIVE.requirement


def unpack_converter(archive: Path, target: Path) -> None:
    """Unpack the Python files of the converter from a source archive to the new folder `target`.
    Links and all other members are left out, so that nothing is written outside it.

    Raises UserError if the archive is damaged, too large or without the converter.
    """
    count = total = 0
    try:
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                name = _name_in_converter(member)
                if name is None:
                    continue
                count, total = count + 1, total + member.size
                if count > MAX_FILES or member.size > MAX_FILE_BYTES or total > MAX_BYTES:
                    raise _damaged(archive, "its converter is too large")
                if (stream := members.extractfile(member)) is not None:
                    _write(target / name, stream.read())
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise _damaged(archive, str(error)) from None
    if missing := _missing_files(target):
        raise _damaged(archive, f"it has no {missing[0]}")


def _name_in_converter(member: tarfile.TarInfo) -> PurePosixPath | None:
    """Return the path of a member in the converter's folder; None if it is not a regular Python
    file of the converter.
    """
    parts = PurePosixPath(member.name).parts
    if not member.isreg() or {"/", ".."} & {*parts} or parts[1:3] != VENDORED_FOLDER:
        return None
    name = PurePosixPath(*parts[3:])
    is_needed = str(name) in (CONVERT_SCRIPT, LORA_SCRIPT) or name.parts[:1] == ("conversion",)
    is_needed |= name.parts[:2] == (MODULE_FOLDER, "gguf")
    return name if is_needed and name.suffix == ".py" else None


def _write(path: Path, data: bytes) -> None:
    """Write one file of the converter. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise write_error(path, error) from None


def _cache_folder(config: Config) -> Path:
    """Return the folder of the converter in the cache. Its name changes with the archive."""
    name = f"{ARCHIVE.package}-{ARCHIVE.version}-{ARCHIVE.sha256[:12]}"
    return config.cache / "converter" / name


def _missing_files(folder: Path) -> list[str]:
    """Return the needed files that a folder lacks."""
    return [name for name in NEEDED_FILES if not (folder / name).is_file()]


def _damaged(archive: Path, reason: str) -> UserError:
    return UserError(
        f"{archive.name} cannot be used: {reason}",
        hint="run the same command again; if it happens twice, the package index serves another "
        "file",
    )
