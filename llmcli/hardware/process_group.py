"""Runs a long child process in its own process group, which can be ended as a whole."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

GRACE_SECONDS = 3.0  # between the request to end and the kill
ChildProcess = subprocess.Popen[bytes]


@contextmanager
def run_process_group(
    command: Sequence[str], log: Path, environ: Mapping[str, str], folder: Path
) -> Iterator[ChildProcess]:
    """Start a command and yield its process, which has a pipe as its stdin. stdout and stderr are
    written to the file `log`. `folder`: its working folder.

    When the with block ends, also by Ctrl-C, the process and everything that it has started are
    ended. If this process is killed, the pipe is closed; the child ends itself then.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environ,
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end_group(process)
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()


def wait_for(process: ChildProcess, seconds: float) -> bool:
    """Wait for the end of a process for at most `seconds`. Return whether it has ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def _end_group(process: ChildProcess) -> None:
    """End a process and all others in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        if number == signal.SIGTERM and process.poll() is None:
            wait_for(process, GRACE_SECONDS)
    process.wait()
