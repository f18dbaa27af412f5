"""Parses and completes file names that the user types in a chat."""

from pathlib import Path

from llmcli.errors import UserError
from llmcli.text_input import expand_path

MAX_COMPLETIONS = 200  # number of names that Tab offers at most


def parse_path(text: str) -> Path:
    """Return the path that a typed file name means. The name may be quoted and may begin with ~.
    Raises UserError if it is empty or names an unknown home folder.
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if not text or "\0" in text:
        raise UserError(
            f"{text!r} is not a file name",
            hint="give a file: notes.txt, ~/notes.txt, './my notes.txt'",
        )
    try:
        return expand_path(text)
    except RuntimeError:  # an unknown ~NAME
        raise UserError(f"no such home folder: {text}", hint="write the full path") from None


def complete_path(typed: str) -> list[str]:
    """Return the existing paths that begin with the text `typed`. Folders end with a slash. Hidden
    files are included only if the typed file name begins with a dot.
    """
    head, slash, name = typed.rpartition("/")
    try:
        folder = expand_path(head + slash) if slash else Path()
        names = sorted(
            path.name + "/" * path.is_dir()
            for path in folder.iterdir()
            if path.name.startswith(name)
        )
    except (OSError, RuntimeError, ValueError):
        return []
    visible_names = [
        file for file in names if (name or not file.startswith(".")) and file.isprintable()
    ]
    return [f"{head}{slash}{file}" for file in visible_names[:MAX_COMPLETIONS]]
