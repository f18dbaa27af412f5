"""`--allow-pickle`, and the hint that suggests it when weights are pickled."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quant.errors import Pickled


def typed() -> list[str]:
    """Return the words of this command line with --allow-pickle added."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return ["llmcli", *words[:end], "--allow-pickle", *words[end:]]


@contextmanager
def offered(command: Callable[[], list[str]] = typed) -> Iterator[None]:
    """Add the command that reads pickles as a hint to a refusal of pickled weights; default: the
    typed command.
    """
    try:
        yield
    except Pickled as error:
        error.hint = shlex.join(command())
        raise
