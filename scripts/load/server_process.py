"""Shared by scripts that run servers as child processes: a free port, and waits with limits."""

import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from typing import Any

START_SECONDS = 300.0
END_SECONDS = 60.0


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now, for servers that cannot choose
    one.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(
    url: str, process: subprocess.Popen[Any], seconds: float = START_SECONDS
) -> None:
    """Return when `/health` of a server answers with status 200. Raises RuntimeError if the server
    ends, and TimeoutError if it is not healthy after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server is not healthy after {seconds:g} s")
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=seconds):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server has ended with {process.returncode}")


def wait_or_kill(process: subprocess.Popen[Any], seconds: float = END_SECONDS) -> int:
    """Return the exit code of a process that ends. Kill it and raise TimeoutExpired if it does not,
    because the end of a `with` block of Popen would wait for it forever.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
