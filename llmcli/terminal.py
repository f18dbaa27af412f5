"""How the terminal is set: kept, without its echo for a while, put back. There may be none, nor
termios (Windows).
"""

import sys
from contextlib import suppress
from typing import Any

try:
    import termios
except ImportError:
    termios = None  # type: ignore[assignment]

LOCAL = 3  # where tcgetattr's list has the local modes


def settings() -> list[Any] | None:
    """How it is set now; None without one."""
    if termios is None or not sys.stdin.isatty():
        return None
    return termios.tcgetattr(sys.stdin.fileno())


def hush(before: list[Any]) -> None:
    """Show no typed keys; `before` is how it was set."""
    quiet = [*before]
    quiet[LOCAL] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, quiet)


def restore(before: list[Any]) -> None:
    """Set it as it was; it may be gone."""
    with suppress(termios.error):
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)
