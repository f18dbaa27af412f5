"""--allow-pickle."""

from typing import Annotated

import typer

AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Read pickled weights (.bin, .pt) too, without running code in them.",
    ),
]
