"""The `general.*` keys of a converted file, in llama.cpp's order.

They come from the gguf package's heuristics, which read the model card and the folder's name.
Sampling settings come from generation_config.json. As in llama.cpp's converter, they are written
into the file, because llama.cpp's programs read them there.
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

# Version of the conversion, which is recorded in converted files.
CONVERSION_VERSION = "1"
HUB_URL = "https://huggingface.co"
COMMIT_NAME = re.compile(r"[0-9a-f]{40}")
# Keys of a model card that llama.cpp's heuristics read. A value of TEXT_KEYS must be a string, a
# value of LIST_KEYS may also be a list of strings.
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
    """The origin of a checkpoint folder. `name` is the model's name. If the folder is in the
    Hugging Face Hub's cache, `repo` is its repository and `revision` its commit, else both are
    None.
    """

    name: str
    repo: str | None = None
    revision: str | None = None


def find_origin(folder: Path) -> CheckpointOrigin:
    """Return the origin of a checkpoint folder, which follows from its path: the Hub's cache has
    folders .../models--ORG--NAME/snapshots/COMMIT.
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
    """Return the general keys and llmcli's own keys of a converted file, as (key, encoded value)
    pairs in the order of the file.

    `weights` are the converted tensors, from which the number of parameters is computed. `method`
    is the quantization in which the checkpoint is stored, "" for none.
    """
    import gguf

    source = find_origin(folder.path)
    writer = gguf.GGUFWriter(None, architecture)
    described = _describe(folder, source, writer, weights)
    described.set_gguf_meta_model(writer)
    gguf_entries = [(key, _encode_value(value)) for key, value in writer.kv_data[0].items()]
    head = [
        ("general.architecture", encode_entry("string", architecture)),
        ("general.type", encode_entry("string", "model")),
    ]
    own_values = {
        "llmcli.convert.version": CONVERSION_VERSION,
        "llmcli.convert.revision": source.revision,
        "llmcli.convert.source_method": method,
    }
    own_entries = [
        (key, encode_entry("string", value)) for key, value in own_values.items() if value
    ]
    return [*head, *(item for item in gguf_entries if item[0] != head[0][0]), *own_entries]


def type_entries(dtype: str) -> list[tuple[str, bytes]]:
    """Return the metadata keys that record the type of the file's matrices, as (key, encoded value)
    pairs. A later quantization replaces their values.
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
    """Return the metadata that the gguf package derives from the model card, the name and the
    number of parameters, with the missing fields filled in. The tensors are registered with
    `writer`, which counts the parameters.
    """
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
    hub_name = {"_name_or_path": origin.repo} if origin.repo else {}
    described = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(), card_values, hub_name, Path(origin.name), total
    )
    described.name = described.name or origin.name
    described.size_label = described.size_label or gguf.size_label(total, shared, expert, experts)
    if origin.repo and not described.source_repo_url:
        described.source_repo_url = f"{HUB_URL}/{origin.repo}"
    for name, value in _sampling_settings(
        folder.read_optional_json("generation_config.json")
    ).items():
        setattr(described, f"sampling_{name}", value)
    return described


def _is_text(value: str | list[str]) -> bool:
    return isinstance(value, str)


def _sampling_settings(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the sampling settings in `values`, the content of generation_config.json, by the gguf
    package's field names. Invalid numbers are left out.
    """
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


def _encode_value(value: "gguf.gguf_writer.GGUFValue") -> bytes:
    """Return a value of the gguf package's writer, encoded as in a file. Among the general keys,
    all arrays are arrays of strings.
    """
    kind = value.type.name.lower()
    python_value: Any = value.value
    return (
        encode_entry("array:string", [str(item) for item in python_value])
        if kind == "array"
        else encode_entry(kind, python_value)
    )
