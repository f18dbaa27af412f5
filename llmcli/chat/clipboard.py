"""Copies text to the clipboard: by a program of the desktop, such as pbcopy or xclip, or by the
terminal's escape sequence OSC 52.
"""

import base64
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
# Number of base64 characters that xterm accepts in one escape sequence. Other terminals accept
# more.
MAX_SEQUENCE_BYTES = 74_994
TIMEOUT_SECONDS = 5.0  # some programs wait forever if there is no display


def copy_text(text: str) -> str | None:
    """Copy `text` with the first of PROGRAMS that is installed and succeeds. Return the program's
    name, or None if no program succeeded.
    """
    for command in PROGRAMS:
        if shutil.which(command[0]) and _run_program(command, text.encode("utf-8", "replace")):
            return command[0]
    return None


def terminal_sequence(text: str) -> str | None:
    """Return the escape sequence OSC 52, by which a terminal copies `text` to its clipboard, or
    None if the text is longer than terminals accept.
    """
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
    return f"\x1b]52;c;{encoded}\x07" if len(encoded) <= MAX_SEQUENCE_BYTES else None


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
