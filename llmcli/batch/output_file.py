"""Checks the name of the output file before a model is downloaded."""

from collections.abc import Iterable
from pathlib import Path

from llmcli.atomic_files import require_writable
from llmcli.errors import UsageError, UserError
from llmcli.text_input import expand_path


def require_output(out: Path, inputs: Iterable[str]) -> Path:
    """Return the output path. Raises UserError if it cannot be written, or UsageError if it is one
    of the input files.
    """
    if out.parent.is_file():
        raise UserError(f"{out.parent} is a file, not a folder", hint="use another -o")
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent}", hint=f"mkdir -p '{out.parent}'")
    for name in inputs:
        source = expand_path(name)
        if out.exists() and source.exists() and out.samefile(source):
            raise UsageError("the output file is the input file", hint="use another name for -o")
    require_writable(out)
    return out
