"""Ends a server together with the process that started it and holds the other end of its standard
input, a pipe.

A pipe instead of Linux's PR_SET_PDEATHSIG, which follows the thread that forked instead of its
process and exists on no other system. The kernel closes the pipe even if the starter is killed with
SIGKILL.
"""

import os
import signal
import threading

READ_BYTES = 1 << 16


def exit_with_parent(descriptor: int) -> None:
    """Send this process SIGTERM when a descriptor reaches its end. Data written to it is
    ignored.
    """
    threading.Thread(target=_wait, args=(descriptor,), name="tether", daemon=True).start()


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, READ_BYTES):
            pass
    except OSError:  # closed, or never open
        pass
    os.kill(os.getpid(), signal.SIGTERM)
