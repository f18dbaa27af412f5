"""The `general.*` keys of a converted file, in llama.cpp's order.

The gguf package's heuristics read the model card and the name. As in llama.cpp's converter,
sampling settings come from generation_config.json, because llama.cpp's tools read them from the
file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.checkpoint import model_card
from quant.checkpoint.folder import CheckpointFolder
from quant.gguf.layout import encode_entry
from quant.recipes import file_types
from quant.source.source import Weight

if TYPE_CHECKING:
    import gguf

# version of the conversion of a checkpoint, which a converted file records
CONVERSION_VERSION = "1"
HUB_URL = "https://huggingface.co"
COMMIT_NAME = re.compile(r"[0-9a-f]{40}")
# Keys of a model card that llama.cpp's heuristics read: keys with a single text, and keys that may
# have several texts.
TEXT_KEYS = frozenset(
    {
        f"{prefix}{key}"
        for prefix in ("", "model_")
        for key in (
            "name",
            "author",
            "version",
            "organization",
            "description",
            "finetune",
            "basename",
            "size_label",
            "url",
            "doi",
            "uuid",
            "repo_url",
        )
    }
    | {"model_creator", "model_type", "license_name", "license_link"}
)
LIST_KEYS = frozenset(
    {
        "license",
        "tags",
        "pipeline_tag",
        "languages",
        "language",
        "datasets",
        "dataset",
        "dataset_sources",
        *model_card.PARENT_KEYS,
    }
)
# Sampling settings: key of generation_config.json -> field of the gguf package, for integers and
# for real numbers.
INTEGER_SETTINGS = {"top_k": "top_k", "penalty_last_n": "penalty_last_n", "mirostat": "mirostat"}
REAL_SETTINGS = {
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temperature": "temp",
    "penalty_repeat": "penalty_repeat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    """The origin of a checkpoint folder: its name, and the repository and commit if the folder is
    in the Hugging Face Hub's cache.
    """

    name: str
    repo: str | None = None
    revision: str | None = None


def find_origin(folder: Path) -> CheckpointOrigin:
    """Return the origin of a folder by its path: .../models--ORG--NAME/snapshots/COMMIT is a folder
    in the Hub's cache.
    """
    folder = folder.absolute().resolve()
    if folder.parent.name != "snapshots":
        return CheckpointOrigin(folder.name)
    parts = folder.parent.parent.name.split("--")
    repo = "/".join(parts[1:]) if parts[0] == "models" and len(parts) == 3 else None
    return CheckpointOrigin(
        parts[-1], repo, folder.name if COMMIT_NAME.fullmatch(folder.name) else None
    )


def general_entries(
    folder: CheckpointFolder, architecture: str, weights: Iterable[Weight], method: str
) -> list[tuple[str, bytes]]:
    """Return the file's general keys and llmcli's own keys as (key, stored value).

    `method` is the quantization of the checkpoint, "" for none.
    """
    import gguf

    source = find_origin(folder.path)
    writer = gguf.GGUFWriter(None, architecture)
    described = _describe(folder, source, writer, weights)
    described.set_gguf_meta_model(writer)
    gguf_entries = [(key, _entry(value)) for key, value in writer.kv_data[0].items()]
    head = [
        ("general.architecture", encode_entry("string", architecture)),
        ("general.type", encode_entry("string", "model")),
    ]
    ours = {
        "llmcli.convert.version": CONVERSION_VERSION,
        "llmcli.convert.revision": source.revision,
        "llmcli.convert.source_method": method,
    }
    own_entries = [(key, encode_entry("string", value)) for key, value in ours.items() if value]
    return [*head, *(item for item in gguf_entries if item[0] != head[0][0]), *own_entries]


def type_entries(dtype: str) -> list[tuple[str, bytes]]:
    """Return the keys for the type of the file's matrices; quantization replaces their values in
    place.
    """
    return [
        ("general.file_type", encode_entry("uint32", file_types.FILE_TYPES[dtype].number)),
        ("general.quantization_version", encode_entry("uint32", 2)),
    ]


def _describe(
    folder: CheckpointFolder,
    origin: CheckpointOrigin,
    writer: "gguf.GGUFWriter",
    weights: Iterable[Weight],
) -> "gguf.Metadata":
    """Return metadata derived from the model card, the name and the number of parameters."""
    import gguf
    import numpy as np

    for weight in weights:
        shape = tuple(reversed(weight.shape))
        writer.add_tensor_info(weight.name, shape, np.dtype(np.float32), 4 * weight.elements)
    total, shared, expert, experts = writer.get_total_parameter_count()
    card_values = {
        key: value
        for key, value in model_card.load_card(folder.path).items()
        if key in LIST_KEYS or (key in TEXT_KEYS and _is_text(value))
    }
    named = {"_name_or_path": origin.repo} if origin.repo else {}
    described = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(), card_values, named, Path(origin.name), total
    )
    described.name = described.name or origin.name
    described.size_label = described.size_label or gguf.size_label(total, shared, expert, experts)
    if origin.repo and not described.source_repo_url:
        described.source_repo_url = f"{HUB_URL}/{origin.repo}"
    for name, value in _sampling(folder.read_optional_json("generation_config.json")).items():
        setattr(described, f"sampling_{name}", value)
    return described


def _is_text(value: str | list[str]) -> bool:
    return isinstance(value, str)


def _sampling(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the sampling settings that the model's makers recommend; invalid numbers are left out."""
    settings: dict[str, int | float] = {}
    for key, name in INTEGER_SETTINGS.items():
        value = values.get(key)
        if type(value) is int and 0 <= value < 1 << 31:
            settings[name] = value
    for key, name in REAL_SETTINGS.items():
        value = values.get(key)
        # this is also False for NaN
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6:
            settings[name] = float(value)
    return settings


def _entry(value: "gguf.gguf_writer.GGUFValue") -> bytes:
    """Return a value of the gguf package's writer as a file stores it. The general keys have only
    arrays of strings.
    """
    kind = value.type.name.lower()
    plain: Any = value.value
    return (
        encode_entry("array:string", [str(item) for item in plain])
        if kind == "array"
        else encode_entry(kind, plain)
    )
