"""Add a hint with `--allow-pickle` to the error that refuses pickled weights."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quant.errors import PickleNotAllowedError


def typed_command() -> list[str]:
    """Return the words of the command line of this process, with --allow-pickle added."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return ["llmcli", *words[:end], "--allow-pickle", *words[end:]]


@contextmanager
def pickle_hint(command: Callable[[], list[str]] = typed_command) -> Iterator[None]:
    """Add a hint to a PickleNotAllowedError of the `with` block: the command that would read the
    pickled weights.

    `command`: returns the words of this command. By default it is the typed command with
    --allow-pickle.
    """
    try:
        yield
    except PickleNotAllowedError as error:
        error.hint = shlex.join(command())
        raise
