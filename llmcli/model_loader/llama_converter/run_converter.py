"""Runs llama.cpp's own converter in a child process, which stops when the header of its GGUF is
complete, so that it can be checked before any weight is converted.

Everything that the process writes is in one folder of the cache, which is deleted at the end.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import llmcli
from llmcli import file_lock
from llmcli.atomic_files import make_folder
from llmcli.catalog import converter_source
from llmcli.catalog.disk_space import require_free_space
from llmcli.config import build_child_environ
from llmcli.errors import UserError
from llmcli.hardware.process_group import ChildProcess, run_process_group, wait_for
from llmcli.model_loader.llama_converter.child import (
    FORMAT_MARK,
    NETWORK_MARK,
    REMOTE_CODE_MARK,
    ConverterRun,
)
from llmcli.units import format_duration, format_size

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI

POLL_SECONDS = 0.1  # between two looks at the growing file
# Time to convert the weights, for an estimate: bytes that are written in a second, and what the rest
# takes. A BF16 checkpoint of 0.5 GB took 13 seconds on two cores with other work.
BYTES_PER_SECOND, OTHER_SECONDS = 60e6, 5.0
LOG_BYTES = 1 << 16  # of the end of the log that are read
SHOWN_LINES, MAX_LINE_CHARACTERS = 8, 300  # of the log, in an error
INSTALL_HINT = "pip install 'llmcli[convert]'"
# What the converter imports, besides the packages that llmcli requires.
PACKAGES = ("torch", "transformers", "sentencepiece")
GGUF_HINT = "pull a GGUF of this model instead"
# What to do if a module is missing. The name of any other module may be text of the checkpoint, so
# that no hint says to install it.
MODULE_HINTS = {
    **dict.fromkeys((*PACKAGES, "google"), INSTALL_HINT),
    "mistral_common": "pip install mistral-common",
    "tiktoken": "pip install tiktoken",
}
# With `python -m`, a module in the current folder could replace one of llmcli or of Python.
CHILD_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from llmcli.model_loader.llama_converter.child import main; main()"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "-1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
}
MISSING_MODULE = re.compile(r"(?:ModuleNotFoundError|ImportError): No module named '([\w.]+)'")
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
PROGRESS_LINE = re.compile(r"\d+%\|")  # of tqdm
UNKNOWN_TOKENIZER = "BPE pre-tokenizer was not recognized"


@dataclass(frozen=True, slots=True)
class ConverterRequest:
    """A request to llama.cpp's converter.

    - `folder`: the checkpoint or adapter; `kind`: what is made of it, in a few words.
    - `script`: the script of the converter, and its arguments, `words`, without the output file.
    - `metadata`: keys and strings that are added to the metadata of the GGUF.
    """

    folder: Path
    kind: str
    script: str
    words: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the folder, for messages."""
        return self.folder.name


class Conversion:
    """A converter that runs. `header_file` has the complete header of its GGUF, and the size of the
    GGUF. `file` is the GGUF itself, which has the weights after `finish`.
    """

    file: Path  # set by wait_for_header

    def __init__(self, request: ConverterRequest, scratch: Path) -> None:
        self.request, self.scratch = request, scratch
        self.is_finished = False
        self._process: ChildProcess | None = None
        self._header = scratch / "header.gguf"

    @property
    def header_file(self) -> Path:
        """A GGUF with the complete header and a hole in place of the weights. It is the finished
        file if the converter did not stop at its header.
        """
        return self._header if self._header.exists() else self.file

    @property
    def nbytes(self) -> int:
        """The size of the GGUF in bytes."""
        return self.header_file.stat().st_size

    @property
    def seconds(self) -> float:
        """An estimate of how long `finish` takes."""
        return OTHER_SECONDS + self.nbytes / BYTES_PER_SECOND

    def wait_for_header(self, process: ChildProcess, ui: "UI") -> None:
        """Wait until the header is complete, or the whole file. Raises UserError if the converter
        fails.
        """
        self._process = process
        with ui.status(f"llama.cpp's converter reads {self.request.name} …"):
            while not self._header.exists():
                if wait_for(process, POLL_SECONDS):
                    break
        if not self._header.exists():
            self._require_success(process, ui)
            self.is_finished = True
        files = list((self.scratch / "out").glob("*.gguf"))
        if len(files) != 1:
            raise UserError(
                f"llama.cpp's converter has written {len(files)} files for {self.request.name}, "
                "not one",
                hint=GGUF_HINT,
            )
        self.file = files[0]

    def finish(self, ui: "UI") -> None:
        """Let the converter write the weights, and wait for its end. Nothing is done if it has
        ended. Raises UserError if it fails, or if the disk has too little space.
        """
        if self.is_finished:
            return
        process = self._process
        assert process is not None and process.stdin is not None
        expected, file = self.nbytes, self.file
        require_free_space(expected - file.stat().st_size, file)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the log says why
            process.stdin.write(b"\n")
            process.stdin.flush()
        with ui.bar(f"convert {self.request.name} ({self.request.kind})", expected) as bar:
            done = 0
            while not wait_for(process, POLL_SECONDS):
                size = _file_size(file, done)
                bar.advance(size - done)
                done = size
            self._require_success(process, ui)
            size = _file_size(file, 0)
            bar.advance(size - done)
        # the converter does not write the padding after the last tensor
        if not expected - 4096 <= size <= expected:
            raise UserError(
                f"llama.cpp's converter has written {size:,} of {expected:,} bytes of "
                f"{self.request.name}",
                hint="run the same command again",
            )
        self.is_finished = True

    def _require_success(self, process: ChildProcess, ui: "UI") -> None:
        """Raise UserError if the process has failed, after printing the last lines of its log."""
        if process.returncode == 0:
            return
        lines = read_last_lines(self.scratch / "log")
        raise _explain_failure(self.request, process.returncode, lines, ui)


def prepare_converter(config: "Config", ui: "UI") -> Path:
    """Return the folder of the converter, which is downloaded if it is missing. Raises UserError if
    that fails, or if a package that the converter needs is not installed. No package is imported.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"llama.cpp's converter needs {', '.join(missing)}, which {verb} not installed",
            hint=INSTALL_HINT,
        )
    return converter_source.fetch_converter(config, ui)


@contextmanager
def start_conversion(
    request: ConverterRequest, converter: Path, config: "Config", ui: "UI"
) -> Iterator[Conversion]:
    """Run the converter in the folder `converter` until the header of its GGUF is complete, and
    yield it. Its file and all its other files are deleted when the with block ends. Raises UserError
    if the converter fails.
    """
    file_name = re.sub(r"[{}]", "_", request.name)[:200]  # the converter would fill in braces
    with hold_scratch_folder(request, config) as scratch:
        run = ConverterRun(
            str(converter),
            request.script,
            (*request.words, "--outfile", str(scratch / "out" / f"{file_name}.gguf")),
            str(scratch / "header.gguf"),
            dict(request.metadata),
        )
        root = str(Path(llmcli.__path__[0]).parent)
        command = [sys.executable, "-P", "-c", CHILD_PROGRAM, root, json.dumps(asdict(run))]
        with run_process_group(
            command, scratch / "log", _environ(converter, scratch), scratch
        ) as process:
            conversion = Conversion(request, scratch)
            conversion.wait_for_header(process, ui)
            yield conversion


@contextmanager
def hold_scratch_folder(request: ConverterRequest, config: "Config") -> Iterator[Path]:
    """Yield a folder of the cache with empty subfolders. It and its lock file, which says that it is
    in use, are deleted when the with block ends.

    If another process converts the same, another folder is used. Waiting for that process could
    last forever, because it may wait for a lock that this process holds.
    """
    key = hashlib.sha256(f"{request.folder.absolute()} {request.kind}".encode()).hexdigest()[:16]
    for number in itertools.count(1):
        scratch = config.cache / "conversions" / f"{key}-{number}"
        lock = scratch.with_suffix(".lock")
        with file_lock.hold_lock(lock) as is_locked:
            if not is_locked:
                continue
            shutil.rmtree(scratch, ignore_errors=True)  # of a killed run
            try:
                for name in ("out", "tmp", "modules"):
                    make_folder(scratch / name)
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
                # A process that has opened the file meanwhile does not get the lock of a deleted one.
                lock.unlink(missing_ok=True)
            return


def describe_cost(conversion: Conversion) -> str:
    """Return what the rest of a conversion takes, as text."""
    return (
        f"{format_size(conversion.nbytes)} on disk and about {format_duration(conversion.seconds)}"
    )


def read_last_lines(log: Path) -> list[str]:
    """Return the last lines of the converter's output, without its progress bars."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = (line.rstrip() for line in text.replace("\r", "\n").split("\n"))
    return [line[:MAX_LINE_CHARACTERS] for line in lines if line and not PROGRESS_LINE.search(line)]


def _environ(converter: Path, scratch: Path) -> dict[str, str]:
    """Return the environment of the converter: no network, no GPU, and all files in `scratch`."""
    environ = build_child_environ(
        **ENVIRONMENT, TMPDIR=str(scratch / "tmp"), HF_MODULES_CACHE=str(scratch / "modules")
    )
    folders = [str(converter / converter_source.MODULE_FOLDER), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "NO_LOCAL_GGUF"):
        environ.pop(name, None)
    return environ


def _explain_failure(request: ConverterRequest, code: int, lines: list[str], ui: "UI") -> UserError:
    """Return the error for a converter that has ended with `code`. Print its last lines if they are
    needed to understand it.
    """
    text = "\n".join(lines)
    if REMOTE_CODE_MARK in text:
        return UserError(
            f"{request.folder} can only be read by Python code of its own, which llmcli never runs",
            hint=GGUF_HINT,
        )
    if match := MISSING_MODULE.search(text):
        return UserError(
            f"llama.cpp's converter needs the module {match[1]}, which is not installed",
            hint=MODULE_HINTS.get(match[1].partition(".")[0], GGUF_HINT),
        )
    if NO_SPACE.search(text):
        return UserError(
            f"the disk of the cache is full, so {request.name} cannot be converted",
            hint="free space (`llmcli gc` shows what it can delete), then run the same command "
            "again; LLMCLI_HOME names another folder for the cache",
        )
    if code == -signal.SIGKILL or "MemoryError" in text:
        return UserError(
            f"llama.cpp's converter was ended while it converted {request.name}: the memory was "
            "probably used up",
            hint=f"close other programs and run the same command again, or {GGUF_HINT}",
        )
    for line in lines[-SHOWN_LINES:]:
        ui.note(f"  {line}")
    last_line = next(
        (line for line in (FORMAT_MARK, NETWORK_MARK) if line in text),
        lines[-1] if lines else f"exit code {code}",
    )
    return UserError(
        f"llama.cpp's converter failed on {request.folder}: {last_line.strip()}",
        hint="llama.cpp's converter does not know this tokenizer: " + GGUF_HINT
        if UNKNOWN_TOKENIZER in text
        else "check that the checkpoint is complete (its last lines are above), or " + GGUF_HINT,
    )


def _file_size(path: Path, default: int) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return default
