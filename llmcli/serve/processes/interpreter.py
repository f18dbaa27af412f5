"""The interpreters in which model processes run.

On Linux, multiprocessing's fork server starts them: a process that has imported the modules below,
and forks for each model process. A model is thus loaded without the imports, which take longer than
to map a small model's file. llmcli never starts a thread of llama.cpp in the fork server, because
these threads do not survive a fork. Elsewhere each model process is a new interpreter, because the
libraries of macOS do not survive one.
"""

import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from llmcli.hardware.limited_process import signal_name

IMPORTED_MODULES = (
    "llmcli.serve.processes.asgi_relay",
    "llmcli.serve.launch",
    "llmcli.model_loader.open_server_model",
    # imported when a model is loaded
    "jinja2.sandbox",
    "llama_cpp",
    "psutil",
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# multiprocessing reads the exit codes of all processes when it starts one; of two threads that read
# a code at once, one would get none
_exit_code_lock = threading.Lock()


def start_fork_server() -> ForkServerContext | SpawnContext:
    """Start the fork server if none runs, without waiting for its imports. Return the context that
    starts model processes: a plain one if there can be no fork server, which needs a temporary
    folder with a short name for its socket.
    """
    plain = multiprocessing.get_context("spawn")
    if sys.platform != "linux":
        return plain
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_MODULES))
    # A signal for the whole process group must not end it: it reports the ends of model processes,
    # which outlive the signal to save their states. It inherits the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    except OSError:
        return plain
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def leave_stop_signals() -> None:
    """Ignore the signals that stop a server in a model process, because the front server ends it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # the mask of the fork server must not reach programs that the process starts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class ChildProcess:
    """A process that runs `main`. Several threads may wait for its end.

    On Linux its end is read from a pidfd, because the fork server may have been killed, and because
    the fork server frees the process id at once. Raises OSError and EOFError if it does not start.
    """

    def __init__(self, main: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._process = start_fork_server().Process(target=main, args=args)
        with _exit_code_lock:
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it has ended already, or the kernel is older than 5.3
                self._pidfd = os.pidfd_open(self.pid)

    def __del__(self) -> None:
        if getattr(self, "_pidfd", None) is not None:
            os.close(self._pidfd)  # type: ignore[arg-type]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the process has ended, at most for `seconds`. Return whether it has."""
        if self._pidfd is None:
            return bool(connection.wait([self._process.sentinel], seconds))
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1e3))

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            return
        with _exit_code_lock:
            self._process.kill()

    @property
    def exit_status(self) -> str:
        """The name of the signal that has ended the process, or its exit code. Waits for the end."""
        self.wait()
        with _exit_code_lock:
            self._process.join()
            code = self._process.exitcode
        assert code is not None
        return signal_name(-code) if code < 0 else f"exit code {code}"
