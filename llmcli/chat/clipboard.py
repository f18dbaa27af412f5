"""Copies text to the desktop's clipboard by running a clipboard program such as pbcopy or xclip."""

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
TIMEOUT_SECONDS = 5.0  # some programs wait forever if there is no display


def copy_text(text: str) -> str | None:
    """Copy `text` with the first of PROGRAMS that is installed and succeeds. Return the program's
    name, or None if no program succeeded.
    """
    for command in PROGRAMS:
        if shutil.which(command[0]) and _run_program(command, text.encode("utf-8", "replace")):
            return command[0]
    return None


def _run_program(command: tuple[str, ...], text: bytes) -> bool:
    """Run a clipboard program with `text` as its input, and return whether it succeeded.

    Some of these programs must keep running to provide the text. They run in a separate session of
    the operating system, so that Ctrl-C in this terminal does not end them.
    """
    try:
        result = subprocess.run(
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
    return result.returncode == 0
