"""Read the terminal's mode (the settings of termios), turn off its echo while an answer is written,
and restore the mode.
Without a terminal or without termios (Windows) there is no mode.
"""

import sys
from contextlib import suppress
from typing import Any

try:
    import termios
except ImportError:
    termios = None  # type: ignore[assignment]

# indexes of the local modes and of the control characters in the list that tcgetattr returns
LOCAL_MODES_INDEX, CHARACTERS_INDEX = 3, 6


def read_mode() -> list[Any] | None:
    """Return the current mode of the terminal of stdin, as tcgetattr gives it. None: no
    terminal.
    """
    if termios is None or not sys.stdin.isatty():
        return None
    return termios.tcgetattr(sys.stdin.fileno())


def set_quit_key(mode: list[Any], key: bytes) -> None:
    """Make the terminal send SIGQUIT for `key`, one control character, and not show the keys that
    the user types. `mode`: its current mode.
    """
    changed = [*mode]
    changed[LOCAL_MODES_INDEX] &= ~termios.ECHO
    changed[CHARACTERS_INDEX] = [*mode[CHARACTERS_INDEX]]
    changed[CHARACTERS_INDEX][termios.VQUIT] = key
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, changed)


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
