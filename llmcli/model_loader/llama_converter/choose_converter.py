"""Chooses who converts a checkpoint: llmcli's own families, or llama.cpp's converter."""

from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import fetch
from llmcli.errors import UsageError, UserError
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UnknownClassError

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.ui import UI

LLAMA_CPP = "llama.cpp"


def reason_for_llama_cpp(path: Path, converter: str) -> str:
    """Return why llama.cpp's converter converts the source at `path`; "" if it does not.
    `converter`: what the user has chosen. Raises UsageError if the source is no folder, and
    llama.cpp's converter was chosen.
    """
    if not path.is_dir():
        if converter == LLAMA_CPP:
            raise UsageError(
                f"--converter applies to checkpoint folders; {path} is not a folder",
                hint="leave out --converter",
            )
        return ""
    if converter == LLAMA_CPP:
        return "--converter says so"
    if converter == "native":
        return ""
    from quant.convert import checkpoint_source

    try:
        checkpoint_source.read_family(CheckpointFolder(path))
    except UnknownClassError as error:
        return f"llmcli itself has no {error.class_name}"
    except UserError:
        return ""  # opening the checkpoint will report the error
    return ""


def download_for_llama_cpp(
    ref: str, model: "FetchedModel", converter: str, config: "Config", ui: "UI"
) -> "FetchedModel":
    """Return the model called `ref` with all its files on this disk if llama.cpp's converter
    converts it, because that reads files. Return any other `model` unchanged. Raises UserError.
    """
    if not model.blobs or not (reason := reason_for_llama_cpp(model.path, converter)):
        return model
    ui.note(
        f"{model.name} is downloaded whole, because llama.cpp's converter reads files: {reason}"
    )
    return fetch.fetch_model(ref, config, ui, revision=model.revision)
