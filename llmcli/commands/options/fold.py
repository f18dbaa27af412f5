"""--fold."""

from typing import Annotated

import typer

Fold = Annotated[
    str,
    typer.Option(
        metavar="KINDS",
        help="Rescale and reorder channels exactly, so that quantization loses less: awq "
        "(important channels get more of a block's range), smooth (moves the activations' range "
        "into the weights), deal (distributes channels over blocks), several separated by commas; "
        "auto: the kinds that were found to help. Chosen with --imatrix or --moments; a fold is "
        "kept only where it lowers the error.",
        show_default=True,
    ),
]
