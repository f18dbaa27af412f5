"""The flags of method settings and type overrides."""

from typing import Annotated

import typer

from quant.methods import METHODS

SplitMaxSize = Annotated[
    str | None,
    typer.Option(
        metavar="N(M|G)",
        help="Write shards NAME-00001-of-0000N.gguf with at most this size of tensors each.",
    ),
]


_METHODS = "; ".join(f"{name}: {method.help}" for name, method in METHODS.items())
