"""A server that the load test starts ends with its parent, also if the parent is killed."""

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

STARTER = """
import sys
from llmcli.bench.load.local_server import served
with served(sys.argv[1], ["-c", "64", "-np", "1"]) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_a_server_does_not_outlive_the_one_who_started_it(stories_gguf: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(stories_gguf)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        url = urlsplit(starter.stdout.readline().strip())
        where = (str(url.hostname), int(url.port or 0))
        with socket.create_connection(where, timeout=30) as connection:
            starter.send_signal(signal.SIGKILL)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""  # the server has gone
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where)


def test_an_end_of_input_is_a_signal_to_stop() -> None:
    tied = (
        "import signal\n"
        "from llmcli.serve.processes import parent_watch\n"
        "parent_watch.exit_with_parent(0)\n"
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", tied], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"words mean nothing")
        process.stdin.close()
        assert process.wait(30) == -signal.SIGTERM
