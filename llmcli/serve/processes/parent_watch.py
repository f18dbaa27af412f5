"""Ends a server when the process that started it ends. The starting process has the other end of
the server's standard input, which is a pipe.

The pipe is better than Linux's PR_SET_PDEATHSIG, which depends on the thread that forked instead of
its process, and which other systems do not have. The kernel closes the pipe even if the starting
process is killed with SIGKILL.
"""

import os
import signal
import threading

READ_BYTES = 1 << 16


def exit_with_parent(descriptor: int) -> None:
    """Send this process SIGTERM when a descriptor reaches its end, that is, when the other end is
    closed. Data that is written to it is ignored.
    """
    threading.Thread(target=_wait, args=(descriptor,), name="tether", daemon=True).start()


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, READ_BYTES):
            pass
    except OSError:  # the descriptor is closed or was never open
        pass
    os.kill(os.getpid(), signal.SIGTERM)
