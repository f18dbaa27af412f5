"""A local server for load tests stops when the process that started it ends."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

STARTER = """
import sys
from llmcli.bench.load.local_server import open_local_server
with open_local_server(sys.argv[1], ["-c", "64", "-np", "1"]) as url:
    print(url, flush=True)
    sys.stdin.read()
"""
STOP_SECONDS = 30.0


def test_the_server_stops_when_its_starter_is_killed(stories_gguf: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(stories_gguf)]
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as starter,
    ):
        assert starter.stdout is not None
        ready_line = starter.stdout.readline().strip()
        assert ready_line, f"the server did not start: {log.read_text()}"
        url = urlsplit(ready_line)
        assert url.hostname and url.port
        address = (url.hostname, url.port)
        with socket.create_connection(address, timeout=STOP_SECONDS) as connection:
            starter.send_signal(signal.SIGKILL)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""  # the server has closed the connection
    assert _refuses_connections(address)


def _refuses_connections(address: tuple[str, int]) -> bool:
    """Return whether the address refuses connections within STOP_SECONDS. The server may close its
    connections before its listening socket.
    """
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=1).close()
        except (ConnectionRefusedError, ConnectionResetError):
            return True
        time.sleep(0.05)
    return False


def test_end_of_input_stops_the_process() -> None:
    program = (
        "import signal\n"
        "from llmcli.serve.processes import parent_watch\n"
        "parent_watch.exit_with_parent(0)\n"
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"words mean nothing")
        process.stdin.close()
        assert process.wait(STOP_SECONDS) == -signal.SIGTERM
