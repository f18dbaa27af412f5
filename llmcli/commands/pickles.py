"""`--allow-pickle`: the flag, and what is said where it would help. It knows words, not what a
pickle holds.
"""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from quant.errors import Pickled

AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Read pickled weights (.bin, .pt) too, without running what is in them.",
    ),
]


def typed() -> list[str]:
    """The words of this command line with the flag among them."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return ["llmcli", *words[:end], "--allow-pickle", *words[end:]]


@contextmanager
def offered(command: Callable[[], list[str]] = typed) -> Iterator[None]:
    """Let the refusal of pickled weights hint at the command that reads them: the one that was
    typed, unless told.
    """
    try:
        yield
    except Pickled as error:
        error.hint = shlex.join(command())
        raise
