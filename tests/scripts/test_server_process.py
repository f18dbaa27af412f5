import subprocess
import sys

import pytest

from scripts.load.server_process import wait_or_kill, wait_until_healthy

IGNORE_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True);"
    " time.sleep(600)"
)


def test_a_server_that_does_not_end_is_killed() -> None:
    command = [sys.executable, "-c", IGNORE_SIGTERM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            wait_or_kill(process, 0.1)
    assert process.returncode == -9


def test_the_wait_for_a_server_that_stays_unhealthy_ends() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as process:
        try:
            with pytest.raises(TimeoutError, match="not healthy"):
                wait_until_healthy("http://127.0.0.1:9", process, 0.1)
        finally:
            process.kill()


def test_the_wait_for_a_server_that_has_ended_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        with pytest.raises(RuntimeError, match="has ended with 3"):
            wait_until_healthy("http://127.0.0.1:9", process)
