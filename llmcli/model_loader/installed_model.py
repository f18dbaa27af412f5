"""Find the model of a name on this disk, without a download."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel, ResolvedRef
    from llmcli.config import Config
    from llmcli.ui import UI


def installed_model(
    resolved: "ResolvedRef", config: "Config", ui: "UI", ref: str
) -> "FetchedModel | None":
    """Return the model `ref` if it is on this disk, otherwise None. For NAME:TYPE it is the
    quantized file of this type, or the original model if there is none. `resolved`: what `ref`
    means in the catalog.
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
