"""`--allow-pickle`, and the hint that suggests it when weights are pickled."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quant.errors import PickleNotAllowedError


def typed_command() -> list[str]:
    """Return the words of this command line with --allow-pickle added."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return ["llmcli", *words[:end], "--allow-pickle", *words[end:]]


@contextmanager
def pickle_hint(command: Callable[[], list[str]] = typed_command) -> Iterator[None]:
    """Add a hint to an error that refuses pickled weights: the command that would read them.

    By default, this is the typed command with --allow-pickle.
    """
    try:
        yield
    except PickleNotAllowedError as error:
        error.hint = shlex.join(command())
        raise
