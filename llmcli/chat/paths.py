"""Files as they are named in a chat: what a name means, what Tab makes of half a name."""

from pathlib import Path

from llmcli.errors import UserError

MANY = 200  # names that Tab offers at most


def named(text: str) -> Path:
    """The path that `text` names; quotes around it and ~ are understood. Raises UserError."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if not text or "\0" in text:
        raise UserError(
            f"{text!r} names no file", hint="name a file: notes.txt, ~/notes.txt, './my notes.txt'"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~nobody
        raise UserError(
            f"there is no such home folder: {text}", hint="write the whole path"
        ) from None


def endings(typed: str) -> list[str]:
    """What half a path may become: names of its folder, folders with a slash. Hidden ones when
    asked for by a dot.
    """
    head, slash, name = typed.rpartition("/")
    try:
        folder = Path(head + slash).expanduser() if slash else Path()
        found = sorted(
            path.name + "/" * path.is_dir()
            for path in folder.iterdir()
            if path.name.startswith(name)
        )
    except (OSError, RuntimeError, ValueError):
        return []
    shown = [one for one in found if (name or not one.startswith(".")) and one.isprintable()]
    return [f"{head}{slash}{one}" for one in shown[:MANY]]
