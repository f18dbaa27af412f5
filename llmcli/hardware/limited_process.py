"""Runs a child process under limits of time and memory, and reports how it ended."""

import os
import resource
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

MAX_OUTPUT_BYTES = 1 << 16  # of the child's stdout; the rest is dropped
MAX_ERROR_BYTES = 1 << 20  # of each file that the child writes, such as its stderr
TAIL_BYTES = 1 << 14  # bytes at the end of stderr that are reported


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of a child process.

    - `data_bytes`: memory of its own, without mapped files.
    - `cpu_seconds`: computing time of all its threads together.
    - `wall_seconds`: time until it is killed.
    """

    data_bytes: int
    cpu_seconds: int
    wall_seconds: float


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGSEGV"; one without a name is "signal 40"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a child process ended. `code`: its exit code, or the negative number of the signal that
    ended it. `output` and `errors`: the beginning of its stdout and the end of its stderr.
    """

    code: int
    timed_out: bool
    output: str
    errors: str

    @property
    def ran_out_of_time(self) -> bool:
        """Return whether the process reached its limit of computing time, or was killed because it
        did not end in time.
        """
        return self.timed_out or self.code == -signal.SIGXCPU

    @property
    def signal_name(self) -> str:
        """Return the name of the signal that ended the process, such as "SIGSEGV"; "" if none."""
        return "" if self.code >= 0 else signal_name(-self.code)


def apply_limits(limits: ProcessLimits) -> None:
    """Limit this process. A process that `run_limited` starts calls it first, because setting the
    limits between fork and exec is not safe in a process with several threads.
    """
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_DATA, limits.data_bytes)
    _lower_limit(resource.RLIMIT_CPU, limits.cpu_seconds)
    _lower_limit(resource.RLIMIT_FSIZE, MAX_ERROR_BYTES)


def _lower_limit(kind: int, value: int) -> None:
    """Set the soft limit of a resource to `value`, or to the hard limit if that is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def run_limited(
    command: Sequence[str], data: bytes, limits: ProcessLimits, environ: Mapping[str, str]
) -> ProcessOutcome:
    """Run a command with `data` on its stdin, and return how it ended. It is killed after
    `limits.wall_seconds`, and if this function is left by an exception such as KeyboardInterrupt.
    The command itself must call `apply_limits`.
    """
    deadline = time.monotonic() + limits.wall_seconds
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as errors:
        stdin.write(data)
        stdin.seek(0)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
        )
        assert process.stdout is not None
        try:
            with process.stdout:
                output, timed_out = _read_until(process.stdout, deadline)
            if timed_out:
                process.kill()
            else:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    timed_out = True
        finally:
            process.kill()  # has no effect on a process that has ended
            process.wait()
        return ProcessOutcome(
            process.returncode, timed_out, output.decode("utf-8", "replace"), _read_tail(errors)
        )


def _read_until(pipe: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """Read a pipe until it is closed at its other end. Return the first MAX_OUTPUT_BYTES bytes, and
    whether `deadline` came first.
    """
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (seconds := deadline - time.monotonic()) > 0:
            if not selector.select(seconds):
                continue
            chunk = os.read(pipe.fileno(), MAX_OUTPUT_BYTES)
            if not chunk:
                return output, False
            output = (output + chunk)[:MAX_OUTPUT_BYTES]
    return output, True


def _read_tail(file: IO[bytes]) -> str:
    """Return the last TAIL_BYTES bytes of a file as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode("utf-8", "replace")
