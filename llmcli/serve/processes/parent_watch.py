"""Ends a server when the process that started it ends. The starting process holds the other end of
the server's standard input, which is a pipe.

A pipe is better than Linux's PR_SET_PDEATHSIG, which depends on the thread that forked instead of
its process, and which other systems do not have. The kernel closes the pipe even if the starting
process is killed with SIGKILL.
"""

import os
import signal
import threading

READ_BYTES = 1 << 16


def exit_with_parent(descriptor: int) -> None:
    """Start a thread that sends this process SIGTERM when the other end of the pipe is closed.
    `descriptor`: the file descriptor of this end, from which all data is read and ignored.
    """
    threading.Thread(target=_wait, args=(descriptor,), name="tether", daemon=True).start()


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, READ_BYTES):
            pass
    except OSError:  # the descriptor is closed or was never open
        pass
    os.kill(os.getpid(), signal.SIGTERM)
