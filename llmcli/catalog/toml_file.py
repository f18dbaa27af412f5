"""Reads a TOML file within limits of size, nesting, numbers and time. The file may be damaged or
written by a stranger.
"""

import tomllib
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.text_input import read_text

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32  # tables and arrays inside one another
MAX_INTEGER = 2**63
# tomllib's time grows with the square of the number of parts of a dotted key. Its steps are
# estimated by the dots of each line; this many take about a second.
MAX_PARSE_STEPS = 50_000_000


def read_toml_text(path: Path) -> str:
    """Return the text of a TOML file without its byte-order mark; line ends are kept. Raises
    UserError if it cannot be read, is too long, or is not UTF-8.
    """
    return read_text(
        path,
        max_bytes=MAX_FILE_BYTES,
        keep_line_ends=True,
        hint="check its permissions",
        size_hint=f"remove entries from {path}, or rename it",
    )


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """Return the tables of the TOML text that the file `path` contains. Raises UserError if the
    text is not TOML, or exceeds a limit.
    """
    hint = f"correct that line of {path}, or rename the file"
    dots = [line.count(".") for line in text.splitlines()]
    if sum(n * n for n in dots) + max(dots, default=0) * len(dots) > MAX_PARSE_STEPS:
        number = dots.index(max(dots)) + 1
        raise UserError(f"{path}: line {number} has {max(dots):,} dots, which are too many", hint)
    try:
        document = tomllib.loads(text)
        _check_values(document)
    except RecursionError:
        raise UserError(f"{path}: its tables or arrays are nested too deeply", hint) from None
    except ValueError as error:  # TOMLDecodeError, or an integer of too many digits
        raise UserError(f"{path}: {error}", hint) from None
    return document


def _check_values(document: dict[str, Any]) -> None:
    """Raise ValueError if a TOML document is nested too deeply, or has an integer of more than 64
    bits.
    """
    values: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for value in values:
            if isinstance(value, dict):
                children += value.values()
            elif isinstance(value, list):
                children += value
            elif type(value) is int and not -MAX_INTEGER <= value < MAX_INTEGER:
                raise ValueError("an integer has more than 64 bits")
        values = children
    if values:
        raise ValueError("its tables or arrays are nested too deeply")
