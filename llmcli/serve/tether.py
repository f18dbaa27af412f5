"""A server that ends with whoever started it: its standard input is a pipe that nobody else holds the other end of.

2026-11-22: a pipe rather than Linux's PR_SET_PDEATHSIG: that one tells of the thread that forked, not of its process,
and other systems have nothing like it. The kernel closes the pipe also where the starter was killed with -9.
"""

import os
import signal
import threading

PIECE = 1 << 16


def tie(descriptor: int) -> None:
    """Have SIGTERM come to this process when a descriptor ends; what is written to it is of no account."""
    threading.Thread(target=_wait, args=(descriptor,), name="tether", daemon=True).start()


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, PIECE):
            pass
    except OSError:  # closed, or never open: nobody holds the other end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
