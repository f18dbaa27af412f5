"""The model, if it is on this disk."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.catalog.fetch import Model, Wanted
    from llmcli.config import Config
    from llmcli.ui import UI


def installed_model(resolved: "Wanted", config: "Config", ui: "UI", ref: str) -> "Model | None":
    """Return the model if it is on this disk, else None; NAME:TYPE is the quantized file if that
    exists.
    """
    from pathlib import Path

    from llmcli.catalog import fetch, remote_checkpoint, store

    model = fetch.find(ref, config, ui) or remote_checkpoint.made(ref, None, config, ui)
    if (
        model is None
        or not resolved.ref.quant
        or not (quantized := store.load_derived(config, model, resolved.ref.quant))
    ):
        return model
    return replace(
        model,
        name=quantized.name,
        path=Path(quantized.path),
        kind="gguf",
        bytes=quantized.bytes,
        sha256=quantized.sha256,
        source=quantized.source,
    )
