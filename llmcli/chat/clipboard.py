"""The desktop's clipboard through whichever program this machine has for it."""

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
PATIENCE = 5.0  # seconds; a program without its display may wait for ever


def copy(text: str) -> str | None:
    """Give `text` to the first program that takes it: that program's name; None where there is
    none.
    """
    for command in PROGRAMS:
        if shutil.which(command[0]) and _took(command, text.encode("utf-8", "replace")):
            return command[0]
    return None


def _took(command: tuple[str, ...], text: bytes) -> bool:
    """Whether a program ended well; those that stay behind to serve the text have a session of
    their own.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
