"""The verdicts of rehearsals: what llama.cpp did when it loaded a file for the first time.

Each verdict is a small JSON file in the folder state/rehearsals. It is valid for one header, the
sizes of the model's files, and one build of llama.cpp. A second file, named by the time stamps of
the model's files, repeats the verdict, so that the header need not be hashed at every start.
"""

import functools
import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llmcli.atomic_files import write_atomically
from llmcli.config import Config
from quant.json_dataclasses import read_json
from quant.model_file.model_header import ModelHeader

FORMAT_VERSION = 1
MAX_VERDICTS = 1000  # files in the folder; the oldest are deleted
MAX_FILE_BYTES = 1 << 13
MAX_HEADER_BYTES = 1 << 28  # of a file without tensors, which is read completely
CRASH, TIME, MEMORY = "crash", "time", "memory"  # the kinds of faults
# The stages of a rehearsal, in order.
LOADING, COMPUTING, FORMATTING = "loading", "computing", "formatting"
# A file that was changed a shorter time ago may be changed again with the same time stamp.
SETTLED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong in a rehearsal. `kind`: CRASH, TIME or MEMORY. `stage`: the stage in which it
    happened (child.py). `cause`: llama.cpp's message, or the name of a signal.
    """

    kind: str
    stage: str
    cause: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a rehearsal. `computed`: whether tokens were computed. `fault`: None if
    llama.cpp survived.
    """

    computed: bool
    fault: Fault | None = None

    def answers(self, computes: bool) -> bool:
        """Return whether this verdict is sufficient for a caller that computes tokens, or that does
        not (`computes`).
        """
        has_loaded = self.fault is None or self.fault.stage == FORMATTING
        return self.computed or not computes or not has_loaded


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """A verdict as it is in a file. `version`: of the format."""

    version: int
    computed: bool
    fault: Fault | None


class VerdictStore:
    """The saved verdicts of one model file."""

    def __init__(self, header: ModelHeader, config: Config) -> None:
        self._header, self._folder = header, config.state / "rehearsals"
        self._build = build_identity()
        self._stamps = _file_stamps(header)
        self._stamp_path = self._path("stamps", json.dumps(self._stamps))
        self._header_path: Path | None = None

    @property
    def lock_path(self) -> Path:
        """Return the path of the lock that a process holds during a rehearsal of this file."""
        return self._folder / "rehearsal.lock"

    def load(self) -> Verdict | None:
        """Return the saved verdict, or None if there is none."""
        if (verdict := _read(self._stamp_path)) is not None:
            return verdict
        verdict = _read(self._path_of_header())
        if verdict is not None:
            self._save_stamp(verdict)
        return verdict

    def save(self, verdict: Verdict) -> None:
        """Save a verdict. Raises UserError if the folder cannot be written."""
        _write(self._path_of_header(), verdict)
        self._save_stamp(verdict)
        _delete_oldest(self._folder)

    def _save_stamp(self, verdict: Verdict) -> None:
        """Save a verdict under the time stamps of the files, unless they were changed just now."""
        newest = max(changed for *_, changed in self._stamps) / 1e9
        if time.time() - newest > SETTLED_SECONDS:
            _write(self._stamp_path, verdict)

    def _path_of_header(self) -> Path:
        if self._header_path is None:
            self._header_path = self._path("header", _header_hash(self._header))
        return self._header_path

    def _path(self, kind: str, identity: str) -> Path:
        digest = hashlib.sha256(f"{FORMAT_VERSION}\0{self._build}\0{kind}\0{identity}".encode())
        return self._folder / f"{digest.hexdigest()[:40]}.json"


@functools.cache
def build_identity() -> str:
    """Return a text that identifies the libraries of llama.cpp and the features of the CPU that
    they use.
    """
    from llmcli.runtime.binding import library

    files = "".join(
        f"{path.name} {status.st_size} {status.st_mtime_ns}\n"
        for path, status in library.library_files()
    )
    features: str = library.system_info()
    return files + features


def _file_stamps(header: ModelHeader) -> list[tuple[int, int, int, int, int]]:
    """Return the device, inode, size, and times of modification and change of each file."""
    return [
        (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            max(status.st_mtime_ns, status.st_ctime_ns),
        )
        for status in (file.stat() for file in header.files)
    ]


def _header_hash(header: ModelHeader) -> str:
    """Return the SHA-256 of the headers and the sizes of all files of a model."""
    digest = hashlib.sha256()
    for path in header.files:
        offsets = (tensor.offset for tensor in header.tensors if tensor.file == path)
        with path.open("rb") as file:
            data = file.read(min(offsets, default=MAX_HEADER_BYTES))
            size = file.seek(0, 2)
        digest.update(len(data).to_bytes(8, "little") + data + size.to_bytes(8, "little"))
    return digest.hexdigest()


def _read(path: Path) -> Verdict | None:
    """Return the verdict in a file, or None if the file is missing or invalid."""
    try:
        record = read_json(VerdictRecord, path, MAX_FILE_BYTES)
    except (OSError, ValueError):
        return None
    return Verdict(record.computed, record.fault) if record.version == FORMAT_VERSION else None


def _write(path: Path, verdict: Verdict) -> None:
    record = VerdictRecord(FORMAT_VERSION, verdict.computed, verdict.fault)
    write_atomically(path, (json.dumps(asdict(record)) + "\n").encode())


def _delete_oldest(folder: Path) -> None:
    """Delete the oldest files of the folder, so that MAX_VERDICTS remain."""
    with suppress(OSError):  # another process deletes them at the same time
        paths = list(folder.glob("*.json"))
        if len(paths) > MAX_VERDICTS:
            paths.sort(key=lambda path: path.stat().st_mtime_ns)
            for path in paths[: len(paths) - MAX_VERDICTS]:
                path.unlink(missing_ok=True)
