"""Chooses who converts a checkpoint: llmcli's own families, or llama.cpp's converter."""

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import converter_source
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.llama_converter import converter_classes
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UnknownClassError

if TYPE_CHECKING:
    from llmcli.config import Config

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


def require_text_class(folder: Path, config: "Config") -> None:
    """Raise UserError if llama.cpp's converter, which is on this disk, does not know a checkpoint's
    class either.
    """
    classes = converter_classes.read_classes(_converter_folder(config))
    values = CheckpointFolder(folder).read_json("config.json")
    names = converter_classes.class_names(values)
    if classes is None or classes.text.intersection(names):
        return
    name = names[-1] if names else "model without a class name"
    raise UserError(
        f"{folder} is a {name}, which neither llmcli nor llama.cpp's converter "
        f"({converter_source.describe_converter(config)}) knows{_nearest(name, classes.text)}",
        hint="pull a GGUF of this model instead",
    )


def has_mmproj_class(folder: Path, config: "Config") -> bool | None:
    """Return whether llama.cpp's converter makes an mmproj file of a checkpoint; None if this
    version does not say it. The converter must be on this disk.
    """
    classes = converter_classes.read_classes(_converter_folder(config))
    if classes is None:
        return None
    values = CheckpointFolder(folder).read_json("config.json")
    names = converter_classes.class_names(values, converter_classes.VISION_PARTS)
    return bool(classes.mmproj.intersection(names))


def _converter_folder(config: "Config") -> Path:
    folder = converter_source.find_converter(config)
    assert folder is not None
    return folder


def _nearest(name: str, classes: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, sorted(classes), n=1)
    return f"; the nearest is {nearest[0]}" if nearest else ""
