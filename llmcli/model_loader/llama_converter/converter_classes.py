"""The classes that llama.cpp's converter knows, read from its source without running it."""

import ast
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.catalog.converter_source import CLASSES_FILE, describe_converter
from llmcli.errors import UserError
from quant.checkpoint.folder import CheckpointFolder

if TYPE_CHECKING:
    from llmcli.config import Config

TABLES = ("TEXT_MODEL_MAP", "MMPROJ_MODEL_MAP")  # of conversion/__init__.py
MAX_FILE_BYTES = 1 << 20
# Names of the settings of a model's parts.
TEXT_PARTS = ("text_config", "llm_config", "lm_config", "language_config", "lfm")
VISION_PARTS = ("vision_config",)


@dataclass(frozen=True, slots=True)
class ConverterClasses:
    """The class names that the converter knows: of language models, and of models from which it
    makes an mmproj file.
    """

    text: frozenset[str]
    mmproj: frozenset[str]


def require_text_class(folder: Path, converter: Path, config: "Config") -> None:
    """Raise UserError if the converter in the folder `converter` does not know the class of the
    checkpoint in `folder` either.
    """
    classes = read_classes(converter)
    names = class_names(CheckpointFolder(folder).read_json("config.json"))
    if classes is None or classes.text.intersection(names):
        return
    name = names[-1] if names else "model without a class name"
    nearest = difflib.get_close_matches(name, sorted(classes.text), n=1)
    raise UserError(
        f"{folder} is a {name}, which neither llmcli nor llama.cpp's converter "
        f"({describe_converter(config)}) knows" + "".join(f"; the nearest is {n}" for n in nearest),
        hint="pull a GGUF of this model instead",
    )


def has_mmproj_class(folder: Path, converter: Path) -> bool | None:
    """Return whether the converter in the folder `converter` makes an mmproj file of the checkpoint
    in `folder`; None if this version does not say it.
    """
    classes = read_classes(converter)
    if classes is None:
        return None
    names = class_names(CheckpointFolder(folder).read_json("config.json"), VISION_PARTS)
    return bool(classes.mmproj.intersection(names))


def read_classes(folder: Path) -> ConverterClasses | None:
    """Return the class names in the converter's tables; None if this version has no such tables."""
    try:
        source = (folder / CLASSES_FILE).read_bytes()[:MAX_FILE_BYTES]
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = {}
    for node in tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id in TABLES
            and isinstance(node.value, ast.Dict)
        ):
            names[node.target.id] = frozenset(
                key.value
                for key in node.value.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )
    return ConverterClasses(*(names[name] for name in TABLES)) if len(names) == 2 else None


def class_names(config: dict[str, Any], parts: Iterable[str] = TEXT_PARTS) -> list[str]:
    """Return the class names by which the converter may choose, the likeliest first: that of the
    first of the `parts` that has one, and that of the whole model. `config`: the content of
    config.json.
    """
    names = [_first_class(config.get(part)) for part in parts]
    return [name for name in (*names, _first_class(config)) if name]


def _first_class(config: Any) -> str:
    names = config.get("architectures") if isinstance(config, dict) else None
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else ""
