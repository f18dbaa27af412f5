"""Reads the properties of a model that `list` and `show` print, such as its architecture and its
number of parameters, as JSON objects.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcli.runtime.drafting.draft_files.heads_file import is_heads_file
from quant.checkpoint import pickles
from quant.gguf.header import TensorInfo
from quant.json_dataclasses import parse_object, read_file
from quant.model_file import model_header, read_header

MAX_JSON_BYTES = 1 << 25  # maximum size of a JSON text in a checkpoint folder
FACT_KEYS = (
    "architecture",
    "parameters",
    "file_type",
    "bits_per_weight",
    "context_length",
    "tokenizer",
    "has_template",
    "types",
    "roles",
)
# Bits per value of the dtypes in safetensors. Unknown dtypes count as 8 bits.
DTYPE_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I64": 64,
    "I32": 32,
    "I8": 8,
    "U8": 8,
}


def read_facts(kind: str, path: Path) -> dict[str, Any]:
    """Return the properties of a model, with FACT_KEYS as keys. `kind`: "gguf" or "folder"; `path`:
    the GGUF or the checkpoint folder. Raises UserError if the GGUF is invalid.
    """
    return (
        checkpoint_facts(path) if kind == "folder" else header_facts(read_header.read_header(path))
    )


def header_facts(header: model_header.ModelHeader) -> dict[str, Any]:
    """Return the properties of a GGUF, with FACT_KEYS as keys. `types` contains the number of
    tensors and bytes of each tensor type, and `roles` those of each kind of weight.
    """
    return {
        "architecture": header.architecture,
        "parameters": header.parameters,
        "file_type": header.file_type,
        "bits_per_weight": round(header.bits_per_weight, 3),
        # draft heads read no text themselves
        "context_length": None if is_heads_file(header) else header.context_length,
        "tokenizer": header.tokenizer,
        "has_template": header.has_template,
        "types": {
            name: {"tensors": count, "bytes": nbytes}
            for name, (count, nbytes) in header.type_totals.items()
        },
        "roles": {name: _role_facts(tensors) for name, tensors in header.tensors_by_role.items()},
    }


def tensor_rows(header: model_header.ModelHeader) -> list[dict[str, Any]]:
    """Return name, shape, type and bytes of every tensor of a GGUF, in the order of the file. The
    shape is in ggml's order, with the row length first.
    """
    return [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "type": tensor.type,
            "bytes": tensor.nbytes,
        }
        for tensor in header.tensors
    ]


def _role_facts(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """Return the numbers of tensors, parameters and bytes of the tensors with one role, and the
    number of tensors of each type.
    """
    kinds = [tensor.type for tensor in tensors]
    return {
        "tensors": len(tensors),
        "parameters": sum(tensor.elements for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "types": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    }


def empty_facts() -> dict[str, Any]:
    """Return the properties of a model that is not on this disk: None for every key."""
    return dict.fromkeys(FACT_KEYS)


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Return the properties of a checkpoint folder, with FACT_KEYS as keys. They are read from its
    JSON files and the headers of its safetensors. Headers that cannot be read are skipped. Pickles
    are not opened; such a checkpoint has the file type "pickled".
    """
    config = read_checkpoint_config(path)
    types: dict[str, dict[str, int]] = {}
    bits = parameters = 0
    for file in sorted(path.glob("*.safetensors")):
        for tensor in _read_tensor_table(file):
            count = 1
            for dimension in tensor["shape"]:
                count *= dimension
            row = types.setdefault(tensor["dtype"], {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += count * DTYPE_BITS.get(tensor["dtype"], 8) // 8
            parameters += count
            bits += count * DTYPE_BITS.get(tensor["dtype"], 8)
    architectures, context = config.get("architectures"), config.get("max_position_embeddings")
    tokenizer = _read_json(path / "tokenizer_config.json")
    fallback_type = "pickled" if pickles.find_pickles(path) else "unknown"
    return {
        "architecture": _text_or_unknown(
            architectures[0] if isinstance(architectures, list) and architectures else None
        ),
        "parameters": parameters,
        "file_type": max(types, key=lambda name: types[name]["bytes"], default=fallback_type),
        "bits_per_weight": round(bits / parameters, 3) if parameters else 0.0,
        "context_length": context if isinstance(context, int) else 0,
        "tokenizer": _text_or_unknown(tokenizer.get("tokenizer_class")),
        "has_template": "chat_template" in tokenizer or (path / "chat_template.jinja").is_file(),
        "types": types,
        "roles": {},
    }


def _text_or_unknown(value: Any) -> str:
    return value if isinstance(value, str) and value else "unknown"


def read_checkpoint_config(path: Path) -> Mapping[str, Any]:
    """Return the config.json of a checkpoint folder. Empty if it is missing or invalid."""
    return _read_json(path / "config.json")


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file. Empty if the file is missing or invalid."""
    try:
        return parse_object(read_file(path, MAX_JSON_BYTES), MAX_JSON_BYTES)
    except (OSError, ValueError):
        return {}


def _read_tensor_table(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects, with `dtype` and `shape`, of all tensors of a safetensors file. Its
    header is 8 bytes with the length of the JSON text, and the JSON text. Invalid objects are left
    out; the list is empty if the header cannot be read.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(file.stat().st_size, MAX_JSON_BYTES):
                return []
            table = parse_object(stream.read(length), MAX_JSON_BYTES)
    except (OSError, ValueError):
        return []
    rows = [value for key, value in table.items() if key != "__metadata__"]
    return [
        row
        for row in rows
        if isinstance(row, dict)
        and isinstance(row.get("dtype"), str)
        and _is_valid_shape(row.get("shape"))
    ]


def _is_valid_shape(shape: Any) -> bool:
    """Return whether a JSON value is a list of at most 8 dimensions below 2**32."""
    if not isinstance(shape, list) or len(shape) > 8:
        return False
    return all(type(dimension) is int and 0 <= dimension < 1 << 32 for dimension in shape)
