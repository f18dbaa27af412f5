"""A server that ends with the process that started it, which alone holds the other end of its
standard input, a pipe.

2026-11-22: a pipe, not Linux's PR_SET_PDEATHSIG, which follows the thread that forked instead of
its process and exists nowhere else. The kernel closes the pipe even when the starter is killed with
-9.
"""

import os
import signal
import threading

PIECE = 1 << 16


def tie(descriptor: int) -> None:
    """Send this process SIGTERM when a descriptor reaches its end; what is written to it is
    ignored.
    """
    threading.Thread(target=_wait, args=(descriptor,), name="tether", daemon=True).start()


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, PIECE):
            pass
    except OSError:  # closed, or never open: nobody holds the other end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
