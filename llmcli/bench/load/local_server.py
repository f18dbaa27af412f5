"""A server of our own in another process: `llmcli serve REF` on a free port of this machine,
stopped at the end.
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

STOPPING = 20.0  # seconds in which it must have stopped
MOST_LOG = 1 << 20  # bytes of its words that are read


@contextmanager
def served(ref: str, flags: Sequence[str]) -> Iterator[str]:
    """Its address, as soon as it is ready and while the block runs. Raises UserError with its last
    words where it does not come up.
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
    with tempfile.TemporaryFile() as log, _leaving_at_sigterm():
        # A session of its own: Ctrl-C is for us, and we stop it. Its stdin is ours: it ends also
        # where we are killed.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=config.child_environ(),
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise UserError(
                    f"the server of {ref} did not start: {_last(log)}", hint=f"llmcli serve {ref}"
                )
            yield str(json.loads(line)["url"])
        finally:
            stop(process)
            process.stdin.close()
            process.stdout.close()


@contextmanager
def _leaving_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as an exception does, so that it takes the server along."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process to end, and end it where it does not."""
    process.terminate()
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last(log: IO[bytes]) -> str:
    """What it said at the end: its error where it told one."""
    log.seek(0)
    lines = [
        line for line in log.read(MOST_LOG).decode("utf-8", "replace").splitlines() if line.strip()
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")
