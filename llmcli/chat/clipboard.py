"""Copies text to the desktop's clipboard with the first clipboard program that works."""

import shutil
import subprocess

PROGRAMS = (
    ("pbcopy",),
    ("wl-copy",),
    ("xclip", "-selection", "clipboard"),
    ("xsel", "--clipboard", "--input"),
    ("termux-clipboard-set",),
    ("clip.exe",),
)
TIMEOUT_SECONDS = 5.0  # seconds; without a display some programs wait forever


def copy_text(text: str) -> str | None:
    """Copy `text` with the first program that works. Returns the program's name, None if there is
    none.
    """
    for command in PROGRAMS:
        if shutil.which(command[0]) and _took(command, text.encode("utf-8", "replace")):
            return command[0]
    return None


def _took(command: tuple[str, ...], text: bytes) -> bool:
    """Run a clipboard program, and return whether it succeeded.

    It runs in a separate session, so that Ctrl-C does not end a program that stays running to serve
    the text.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
