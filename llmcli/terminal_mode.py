"""Reads the terminal's mode, turns off its echo, and restores the mode.

Without a terminal or without termios (Windows) there is no mode to read.
"""

import sys
from contextlib import suppress
from typing import Any

try:
    import termios
except ImportError:
    termios = None  # type: ignore[assignment]

LOCAL_MODES_INDEX = 3  # index of the local modes in the list that tcgetattr returns


def read_mode() -> list[Any] | None:
    """Return the terminal's current mode, or None without a terminal."""
    if termios is None or not sys.stdin.isatty():
        return None
    return termios.tcgetattr(sys.stdin.fileno())


def disable_echo(mode: list[Any]) -> None:
    """Stop the terminal from echoing keys. `mode` is its current mode."""
    quiet = [*mode]
    quiet[LOCAL_MODES_INDEX] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, quiet)


def restore_mode(mode: list[Any]) -> None:
    """Restore `mode`; do nothing if the terminal is closed."""
    with suppress(termios.error):
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, mode)
