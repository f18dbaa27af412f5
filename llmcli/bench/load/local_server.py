"""A local server for load tests: `llmcli serve REF` in a child process on a free port. It is
stopped after the test.
"""

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

from llmcli import config
from llmcli.errors import UserError

STOP_SECONDS = 20.0  # seconds to wait for the server to stop
MAX_LOG_BYTES = 1 << 20  # maximum bytes of the server's log that are read


@contextmanager
def open_local_server(ref: str, flags: Sequence[str]) -> Iterator[str]:
    """Start `llmcli serve` for a model, yield the server's URL when it is ready, and stop the
    server after the block. Raises UserError with the server's last message if it does not start.
    """
    command = [
        sys.executable,
        "-m",
        "llmcli.app",
        "serve",
        ref,
        "--port",
        "0",
        "--json",
        "--while-stdin",
        *flags,
    ]
    with tempfile.TemporaryFile() as log, _exit_on_sigterm():
        # In its own session, Ctrl-C does not reach the server; this process stops it. The server
        # also ends when its stdin closes, for example if this process is killed.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=config.build_child_environ(),
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            ready_line = process.stdout.readline()
            if not ready_line:
                raise UserError(
                    f"the server of {ref} did not start: {_last_message(log)}",
                    hint=f"llmcli serve {ref}",
                )
            yield str(json.loads(ready_line)["url"])
        finally:
            stop_process(process)
            process.stdin.close()
            process.stdout.close()


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into a SystemExit exception within the block, so that cleanup code can stop the
    server before this process ends.
    """

    def raise_exit(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def stop_process(process: "subprocess.Popen[bytes]") -> None:
    """Terminate a process, and kill it if it is still running after STOP_SECONDS."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_message(log: IO[bytes]) -> str:
    """Return the last error message in the log; without an error message, the last line."""
    log.seek(0)
    lines = [
        line
        for line in log.read(MAX_LOG_BYTES).decode("utf-8", "replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ")
