import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from llmcli.serve.processes.interpreter import ChildProcess, leave_stop_signals

PROGRAM = """
import sys
from llmcli.serve.processes.interpreter import start_fork_server

context = start_fork_server()
process = context.Process(target=exec, args=("import sys; print('llmcli.serve.http.app' in sys.modules)",))
process.start()
process.join()
print(context.get_start_method(), process.exitcode)
"""


def run_program(**environment: str) -> list[str]:
    """Run the program, which starts a process, and return the lines that both print."""
    words = [sys.executable, "-c", PROGRAM]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is used on Linux only")
def test_a_process_starts_with_the_modules_imported(tmp_path: Path) -> None:
    assert run_program() == ["True", "forkserver 0"]


def test_a_temporary_folder_with_a_long_name_gives_a_new_interpreter(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * 120)
    folder.mkdir()
    assert run_program(TMPDIR=str(folder)) == ["False", "spawn 0"]


@contextmanager
def waiting_process() -> Iterator[tuple[ChildProcess, socket.socket]]:
    """Run a process that ends when its link is closed. Yield it and our end of the link."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = ChildProcess(wait_for_the_other_end, (theirs,))
        assert ours.recv(5) == b"ready"
        yield process, ours


def fork_server_of(process: ChildProcess) -> psutil.Process:
    """Return the process that has forked a process. Skips the test where there is none."""
    parent = psutil.Process(process.pid).parent()
    assert parent is not None
    if parent.pid == os.getpid():
        pytest.skip("no fork server on this system")
    return parent


def test_the_end_of_a_process_is_not_read_from_the_fork_server() -> None:
    with waiting_process() as (process, link):
        server = fork_server_of(process)
        server.kill()
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        assert not process.wait(0)
        link.close()
        assert process.wait(60)
        assert process.exit_status  # it is unknown, but its reading ends


def test_the_fork_server_survives_the_signals_that_stop_a_server() -> None:
    with waiting_process() as (process, link):
        server = fork_server_of(process)
        for number in (signal.SIGTERM, signal.SIGINT):
            server.send_signal(number)
        link.close()
        assert process.exit_status == "exit code 0"


def test_the_status_of_a_killed_process_is_the_name_of_the_signal() -> None:
    with waiting_process() as (process, _):
        process.kill()
        assert process.exit_status == "SIGKILL"
        process.kill()  # no other process with this id is killed


def wait_for_the_other_end(link: socket.socket) -> None:
    """Run in the child process until the other end of the link is closed."""
    leave_stop_signals()
    with link:
        link.sendall(b"ready")
        link.recv(1)
