"""Reads the API key that is sent to a server."""

from pathlib import Path

from llmcli.errors import UserError
from llmcli.text_input import read_text


def read_api_key(key: str | None, file: Path | None) -> str | None:
    """Return `key`, or the first word in `file` if that is given. Raises UserError if the file
    cannot be read, or if the key has characters that a request cannot contain.
    """
    if file is not None:
        hint = "--api-key-file takes a file that contains a key"
        words = read_text(file, hint=hint).split()
        if not words:
            raise UserError(f"{file} contains no key", hint=hint)
        key = words[0]
    if key and not (key.isascii() and key.isprintable()):
        raise UserError("the API key has characters that no key has", hint="copy it again")
    return key or None
