"""What a file says of itself beside its architecture: the `general.*` keys, in llama.cpp's order.

The gguf package's heuristics read the card and the name; settings for sampling come from
generation_config.json, as upstream takes them, since llama.cpp's tools read them. It knows files
and entries, no tensors' values.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant import card, recipe
from quant.source import Weight
from quant.tensors import read_json
from quant.writer import entry

if TYPE_CHECKING:
    import gguf

VERSION = "1"  # of the road from a folder to a file
HUB = "https://huggingface.co"
SNAPSHOT = re.compile(r"[0-9a-f]{40}")
# Keys of a card that llama.cpp's heuristics read: those that are one text, and those that may be
# several.
ONE = frozenset(
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
MANY = frozenset(
    {
        "license",
        "tags",
        "pipeline_tag",
        "languages",
        "language",
        "datasets",
        "dataset",
        "dataset_sources",
        *card.PARENTS,
    }
)
# generation_config.json's name -> the package's field; whole numbers and reals.
WHOLE = {"top_k": "top_k", "penalty_last_n": "penalty_last_n", "mirostat": "mirostat"}
REAL = {
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
class Origin:
    """Where a folder came from: its name, and the repository and commit where it lies in the hub's
    cache.
    """

    name: str
    repo: str | None = None
    revision: str | None = None


def origin(folder: Path) -> Origin:
    """Read off where a folder stands: …/models--ORG--NAME/snapshots/COMMIT is the hub's."""
    folder = folder.absolute().resolve()
    if folder.parent.name != "snapshots":
        return Origin(folder.name)
    parts = folder.parent.parent.name.split("--")
    repo = "/".join(parts[1:]) if parts[0] == "models" and len(parts) == 3 else None
    return Origin(parts[-1], repo, folder.name if SNAPSHOT.fullmatch(folder.name) else None)


def general(
    folder: Path, architecture: str, weights: Iterable[Weight], method: str
) -> list[tuple[str, bytes]]:
    """The general keys of the file, and ours; `method` is the quantization the checkpoint came in,
    "" for none.
    """
    import gguf

    where = origin(folder)
    writer = gguf.GGUFWriter(None, architecture)
    found = _described(folder, where, writer, weights)
    found.set_gguf_meta_model(writer)
    made = [(key, _entry(value)) for key, value in writer.kv_data[0].items()]
    head = [
        ("general.architecture", entry("string", architecture)),
        ("general.type", entry("string", "model")),
    ]
    ours = {
        "llmcli.convert.version": VERSION,
        "llmcli.convert.revision": where.revision,
        "llmcli.convert.source_method": method,
    }
    told = [(key, entry("string", value)) for key, value in ours.items() if value]
    return [*head, *(item for item in made if item[0] != head[0][0]), *told]


def types(dtype: str) -> list[tuple[str, bytes]]:
    """The keys that say what the file's matrices are; quantizing sets them anew, in this place."""
    return [
        ("general.file_type", entry("uint32", recipe.FILE_TYPES[dtype].number)),
        ("general.quantization_version", entry("uint32", 2)),
    ]


def _described(
    folder: Path, where: Origin, writer: "gguf.GGUFWriter", weights: Iterable[Weight]
) -> "gguf.Metadata":
    """What the card, the name and the number of parameters say."""
    import gguf
    import numpy as np

    for weight in weights:
        shape = tuple(reversed(weight.shape))
        writer.add_tensor_info(weight.name, shape, np.dtype(np.float32), 4 * weight.elements)
    total, shared, expert, experts = writer.get_total_parameter_count()
    told = {
        key: value
        for key, value in card.load(folder).items()
        if key in MANY or (key in ONE and _text(value))
    }
    named = {"_name_or_path": where.repo} if where.repo else {}
    found = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(), told, named, Path(where.name), total
    )
    found.name = found.name or where.name
    found.size_label = found.size_label or gguf.size_label(total, shared, expert, experts)
    if where.repo and not found.source_repo_url:
        found.source_repo_url = f"{HUB}/{where.repo}"
    for name, value in _sampling(folder).items():
        setattr(found, f"sampling_{name}", value)
    return found


def _text(value: str | list[str]) -> bool:
    return isinstance(value, str)


def _sampling(folder: Path) -> dict[str, int | float]:
    """The settings that the model's makers recommend; what is no sound number is left out."""
    file = folder / "generation_config.json"
    values = read_json(file) if file.is_file() else {}
    found: dict[str, int | float] = {}
    for key, name in WHOLE.items():
        value = values.get(key)
        if type(value) is int and 0 <= value < 1 << 31:
            found[name] = value
    for key, name in REAL.items():
        value = values.get(key)
        if (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
        ):  # and not NaN
            found[name] = float(value)
    return found


def _entry(value: "gguf.gguf_writer.GGUFValue") -> bytes:
    """A value of the package's writer as a file stores it; its arrays are of strings here."""
    kind = value.type.name.lower()
    plain: Any = value.value
    return (
        entry("array:string", [str(item) for item in plain])
        if kind == "array"
        else entry(kind, plain)
    )
