"""Read the terminal's mode (the settings of termios), turn off its echo, and restore the mode.
Without a terminal or without termios (Windows) there is no mode.
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
    """Return the current mode of the terminal of stdin, as tcgetattr gives it. None: no
    terminal.
    """
    if termios is None or not sys.stdin.isatty():
        return None
    return termios.tcgetattr(sys.stdin.fileno())


def disable_echo(mode: list[Any]) -> None:
    """Make the terminal not show the keys that the user types. `mode`: its current mode."""
    silent_mode = [*mode]
    silent_mode[LOCAL_MODES_INDEX] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, silent_mode)


def enable_echo(mode: list[Any]) -> None:
    """Make the terminal show the keys that the user types. `mode`: its current mode."""
    shown_mode = [*mode]
    shown_mode[LOCAL_MODES_INDEX] |= termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, shown_mode)


def discard_input() -> None:
    """Discard the keys that were typed and not read yet."""
    termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def restore_mode(mode: list[Any]) -> None:
    """Set the terminal to `mode`, which `read_mode` returned. Do nothing if it is closed."""
    with suppress(termios.error):
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, mode)
