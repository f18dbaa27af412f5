"""Prepare a model to be loaded: download it if it is missing, and quantize it if it is in floats.
`pull --quant`, `chat`, `run`, `serve` and `bench` use this.
"""

from dataclasses import replace
from pathlib import Path

from llmcli import file_lock
from llmcli.catalog import fetch, remote_checkpoint, store
from llmcli.catalog.fetch import FetchedModel
from llmcli.config import Config
from llmcli.model_loader import pickle_hint
from llmcli.ui import UI


def prepare_model(ref: str, quant: str | None, config: Config, ui: UI) -> FetchedModel:
    """Return the model `ref` as a GGUF file that can be loaded (`path` of the result). Missing
    files are downloaded.

    The file has the type `quant`, or the type in the name (NAME:TYPE). Without either, a model in
    floats is quantized to the type in its catalog entry, and a quantized file is used as it is.

    Raises UserError. For pickled weights, its hint is the `llmcli pull` command that reads them.
    """
    if quant:
        quant = canonical_type(quant)
    with pickle_hint.pickle_hint(lambda: _pull_command(ref, quant, config)):
        model = fetch_or_reuse(ref, quant, config, ui)
        file_type = quant or model.quant or catalog_type(model)
        return quantize_if_needed(model, file_type, config, ui) if file_type else model


def _pull_command(ref: str, quant: str | None, config: Config) -> list[str]:
    """Return the words of the `llmcli pull` command that reads pickled weights and prepares the
    same file as `prepare_model(ref, quant, …)`.
    """
    resolved = fetch.resolve_ref(ref, config)
    file_type = (
        quant or resolved.ref.quant or (resolved.entry.quant if resolved.entry else "Q4_K_M")
    )
    return ["llmcli", "pull", ref, "--quant", file_type, "--allow-pickle"]


def fetch_or_reuse(
    ref: str,
    quant: str | None,
    config: Config,
    ui: UI,
    *,
    keep_source: bool = False,
    revision: str | None = None,
    source: str | None = None,
    force: bool = False,
) -> FetchedModel:
    """Return the model `ref` from this disk, or download it.

    If a quantized type is requested, by `quant` or by the name NAME:TYPE, a checkpoint on the hub
    is not downloaded: its weights are read from the hub while they are quantized. `keep_source`
    downloads it. `force` ignores what is on this disk. Raises UserError.
    """
    local_model = (
        None if force else fetch.find_model(ref, config, ui, revision=revision, source=source)
    )
    if local_model is None and not keep_source:
        if not force and (
            quantized := remote_checkpoint.find_quantized(
                ref, quant, config, ui, revision=revision, source=source
            )
        ):
            return quantized
        if (quant or fetch.resolve_ref(ref, config).ref.quant) and (
            checkpoint := remote_checkpoint.open_remote_checkpoint(
                ref, config, ui, revision=revision, source=source, force=force
            )
        ):
            return checkpoint
    return local_model or fetch.fetch_model(
        ref, config, ui, revision=revision, source=source, force=force
    )


def catalog_type(model: FetchedModel) -> str | None:
    """Return the type to which the catalog wants a model to be quantized, if the model is a GGUF of
    floats with a catalog entry. Return None for any other model.
    """
    from quant.model_file import read_header
    from quant.recipes.file_types import FLOAT_FILE_TYPES

    if model.source.startswith("quantized:"):
        return None
    if (
        model.entry is None
        or model.kind != "gguf"
        or read_header.read_header(model.path).file_type not in FLOAT_FILE_TYPES
    ):
        return None
    return model.entry.quant


def canonical_type(quant: str) -> str:
    """Return the full name of a file type: "Q4_K_M" for "q4_k". Raises UserError, which suggests
    similar names, for an unknown type.
    """
    from quant.recipes import tensor_types

    return tensor_types.parse_file_type(quant).name


def quantize_if_needed(model: FetchedModel, file_type: str, config: Config, ui: UI) -> FetchedModel:
    """Return `model` as a GGUF of the type `file_type`. It is the model itself if it has this type,
    or a file that was quantized earlier, or a file that is quantized now. Raises UserError.
    """
    from llmcli.model_loader.llama_converter import choose_converter
    from llmcli.model_loader.quantize_file import quantize_file
    from quant.model_file import read_header

    file_type = canonical_type(file_type)
    if model.kind == "gguf" and read_header.read_header(model.path).file_type == file_type:
        return model
    model = choose_converter.download_for_llama_cpp(model.name, model, "auto", config, ui)
    out = store.quantized_path(config, model, file_type)
    with file_lock.hold_lock(store.lock_path(config, model.name), ui, model.name):
        quantized = store.load_quantized(config, model, file_type)
        if quantized is None:
            allowed = config.allow_pickle and model.kind == "folder"
            quantize_file(
                model.path,
                file_type,
                out,
                config,
                ui,
                blobs=model.blobs,
                allow_pickle=allowed,
            )
            quantized = store.record_quantized(
                config, model, file_type, remote_checkpoint.build_record(model)
            )
    return replace(
        model,
        name=quantized.name,
        path=Path(quantized.path),
        kind="gguf",
        nbytes=quantized.bytes,
        sha256=quantized.sha256,
        source=quantized.source,
        quant=None,
        blobs=None,
        record={},
    )
