"""Finds the model of a name on this disk."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel, ResolvedRef
    from llmcli.config import Config
    from llmcli.ui import UI


def installed_model(
    resolved: "ResolvedRef", config: "Config", ui: "UI", ref: str
) -> "FetchedModel | None":
    """Return the model if it is on this disk, else None.

    For NAME:TYPE, it is the quantized file if that exists.
    """
    from pathlib import Path

    from llmcli.catalog import fetch, remote_checkpoint, store

    model = fetch.find_model(ref, config, ui) or remote_checkpoint.find_quantized(
        ref, None, config, ui
    )
    if (
        model is None
        or not resolved.ref.quant
        or not (quantized := store.load_quantized(config, model, resolved.ref.quant))
    ):
        return model
    return replace(
        model,
        name=quantized.name,
        path=Path(quantized.path),
        kind="gguf",
        nbytes=quantized.bytes,
        sha256=quantized.sha256,
        source=quantized.source,
    )
