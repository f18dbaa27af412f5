"""A model's identity as a JSON object, and the formatting of parameter counts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel


def model_identity(model: "FetchedModel") -> dict[str, Any]:
    """Return the fields that identify a model in the JSON documents of `pull`, `list` and
    `show`.
    """
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.nbytes,
        "sha256": model.sha256 or None,
        "source": model.source,
        "revision": model.revision,
    }


def format_count(number: int | None) -> str:
    """Format a parameter count for display: 134515008 becomes "134.5M"; "-" if it is unknown."""
    if not number:
        return "-"
    for step, letter in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")):
        if number >= step:
            return f"{number / step:.1f}{letter}"
    return str(number)
