"""From a name to a file that can be run: fetch what is missing, quantize what is still in floats.

What `pull --quant`, `chat`, `run` and `bench` share. It joins the catalog with quant and knows
neither the runtime nor the terminal.
"""

from dataclasses import replace
from pathlib import Path

from llmcli.catalog import fetch, store, straight
from llmcli.catalog.fetch import Model
from llmcli.commands import pickles
from llmcli.config import Config
from llmcli.ui import UI

FLOATS = ("F32", "F16", "BF16")


def ready(ref: str, quant: str | None, config: Config, ui: UI) -> Model:
    """The model called `ref` as a GGUF that can be loaded: `path` of what is returned.

    A float checkpoint becomes its catalog type; a file already quantized is used as it is unless
    `quant` (or the name itself, NAME:TYPE) asks for another type. Raises Refusal: for pickles it
    names the pull that reads them.
    """
    if quant:
        quant = checked(quant)
    with pickles.offered(lambda: _pull(ref, quant, config)):
        model = fetched(ref, quant, config, ui)
        wanted = quant or model.quant or promised(model)
        return derive(model, wanted, config, ui) if wanted else model


def _pull(ref: str, quant: str | None, config: Config) -> list[str]:
    """The command that would leave here what is wanted, of pickles too."""
    wanted = fetch.resolve(ref, config)
    kind = quant or wanted.ref.quant or (wanted.entry.quant if wanted.entry else "Q4_K_M")
    return ["llmcli", "pull", ref, "--quant", kind, "--allow-pickle"]


def fetched(
    ref: str,
    quant: str | None,
    config: Config,
    ui: UI,
    *,
    keep_source: bool = False,
    revision: str | None = None,
    source: str | None = None,
    force: bool = False,
) -> Model:
    """The model called `ref`, as little of it as is needed: what is here, or of a checkpoint only
    what is read.

    Where a type is named a checkpoint on the hub stays there, unless `keep_source`. Raises Refusal.
    """
    here = None if force else fetch.find(ref, config, ui, revision=revision, source=source)
    if here is None and not keep_source:
        if not force and (
            made := straight.made(ref, quant, config, ui, revision=revision, source=source)
        ):
            return made
        if (quant or fetch.resolve(ref, config).ref.quant) and (
            model := straight.open_checkpoint(ref, config, ui, revision=revision, source=source)
        ):
            return model
    return here or fetch.obtain(ref, config, ui, revision=revision, source=source, force=force)


def promised(model: Model) -> str | None:
    """The type that the catalog says a GGUF of floats becomes; None for a file of any other kind."""
    from quant import container

    if model.source.startswith("quantized:"):
        return None
    if (
        model.entry is None
        or model.kind != "gguf"
        or container.read(model.path).file_type not in FLOATS
    ):
        return None
    return model.entry.quant


def checked(quant: str) -> str:
    """The full name of a file type; raises Refusal with the nearest names before anything is
    fetched.
    """
    from quant import recipe

    return recipe.parse(quant).name


def derive(model: Model, file_type: str, config: Config, ui: UI) -> Model:
    """`model` in `file_type`: itself if it is that, else quantized now unless that is here already."""
    from llmcli.commands.weights import quantize_to
    from quant import container

    file_type = checked(file_type)
    if model.kind == "gguf" and container.read(model.path).file_type == file_type:
        return model
    out = store.derived_path(config, model, file_type)
    with store.locked(store.lock_file(config, model.name), ui, model.name):
        made = store.load_derived(config, model, file_type)
        if made is None:
            allowed = config.allow_pickle and model.kind == "folder"
            quantize_to(model.path, file_type, out, ui, blobs=model.blobs, allow_pickle=allowed)
            made = store.record_derived(config, model, file_type, model.record)
    return replace(
        model,
        name=made.name,
        path=Path(made.path),
        kind="gguf",
        bytes=made.bytes,
        sha256=made.sha256,
        source=made.source,
        quant=None,
        blobs=None,
        record={},
    )
