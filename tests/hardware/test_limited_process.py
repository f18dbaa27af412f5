"""A child process ends at its limits of time and memory, and its end is reported."""

import os
import signal
import sys
from pathlib import Path
from typing import IO

import pytest

from llmcli.hardware import limited_process
from llmcli.hardware.limited_process import ProcessLimits, ProcessOutcome, run_limited

ROOT = str(Path(limited_process.__file__).parents[2])
LIMITS = ProcessLimits(1 << 30, 30, 120.0)
PROLOGUE = f"""
import os, sys
sys.path.insert(0, {ROOT!r})
from llmcli.hardware.limited_process import ProcessLimits, apply_limits
"""


def run(program: str, limits: ProcessLimits = LIMITS, data: bytes = b"") -> ProcessOutcome:
    """Run a Python program that limits itself first."""
    start = (
        f"{PROLOGUE}\napply_limits(ProcessLimits({limits.data_bytes}, {limits.cpu_seconds}, 0))\n"
    )
    return run_limited([sys.executable, "-c", start + program], data, limits, dict(os.environ))


def test_output_errors_and_exit_code_are_reported() -> None:
    outcome = run("print(sys.stdin.read()); sys.stderr.write('why'); sys.exit(7)", data=b"hello")
    assert (outcome.code, outcome.output, outcome.errors) == (7, "hello\n", "why")
    assert not outcome.ran_out_of_time
    assert outcome.signal_name == ""


def test_a_crash_is_reported_by_the_name_of_its_signal() -> None:
    outcome = run("print('before', flush=True); os.abort()")
    assert (outcome.code, outcome.signal_name) == (-signal.SIGABRT, "SIGABRT")
    assert outcome.output == "before\n"


def test_a_loop_ends_at_the_limit_of_computing_time() -> None:
    outcome = run("while True: pass", ProcessLimits(1 << 30, 1, 120.0))
    assert outcome.ran_out_of_time
    assert not outcome.timed_out


def test_a_process_that_waits_is_killed_at_the_limit_of_time() -> None:
    outcome = run("import threading; threading.Event().wait()", ProcessLimits(1 << 30, 30, 0.2))
    assert outcome.timed_out
    assert outcome.ran_out_of_time


def test_a_process_that_closes_its_output_is_killed_at_the_limit_of_time() -> None:
    program = "os.close(1); import threading; threading.Event().wait()"
    assert run(program, ProcessLimits(1 << 30, 30, 0.5)).timed_out


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count mapped memory")
def test_memory_beyond_the_limit_is_refused_but_a_mapped_file_is_not_counted(
    tmp_path: Path,
) -> None:
    file = tmp_path / "large"
    file.touch()
    os.truncate(file, 1 << 30)
    program = f"""
import mmap
with open({str(file)!r}, "rb") as stream:
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
print(len(mapped))
try:
    bytearray(1 << 30)
except MemoryError:
    print("refused")
"""
    outcome = run(program, ProcessLimits(256 << 20, 30, 120.0))
    assert outcome.output.split() == [str(1 << 30), "refused"]


def test_a_long_output_is_cut_and_does_not_block() -> None:
    outcome = run("sys.stdout.write('x' * 1_000_000); sys.stderr.write('y' * 100_000 + 'end')")
    assert outcome.code == 0
    assert len(outcome.output) == limited_process.MAX_OUTPUT_BYTES
    assert len(outcome.errors) == limited_process.TAIL_BYTES
    assert outcome.errors.endswith("yend")


def test_the_process_is_killed_when_the_wait_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipes = []

    def interrupt(pipe: IO[bytes], deadline: float) -> None:
        pipes.append(os.dup(pipe.fileno()))
        raise KeyboardInterrupt

    monkeypatch.setattr(limited_process, "_read_until", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("import threading; threading.Event().wait()")
    assert os.read(pipes[0], 1) == b"", "the process, which had the other end, has ended"
    os.close(pipes[0])
