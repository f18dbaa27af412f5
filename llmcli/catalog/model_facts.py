"""The properties of a model on this disk that `list` and `show` print, under their JSON names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quant.checkpoint import pickles
from quant.gguf.header import TensorInfo
from quant.model_file import model_header, read_header

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
    """Return the properties of a model under the keys of FACT_KEYS.

    `types` maps a type to {"tensors", "bytes"}. Raises UserError for a broken GGUF.
    """
    return (
        checkpoint_facts(path) if kind == "folder" else header_facts(read_header.read_header(path))
    )


def header_facts(header: model_header.ModelHeader) -> dict[str, Any]:
    """Return the properties of a GGUF under the keys of FACT_KEYS."""
    return {
        "architecture": header.architecture,
        "parameters": header.parameters,
        "file_type": header.file_type,
        "bits_per_weight": round(header.bits_per_weight, 3),
        "context_length": header.context_length,
        "tokenizer": header.tokenizer,
        "has_template": header.has_template,
        "types": {
            name: {"tensors": count, "bytes": nbytes}
            for name, (count, nbytes) in header.type_totals.items()
        },
        "roles": {name: _role(tensors) for name, tensors in header.tensors_by_role.items()},
    }


def tensor_rows(header: model_header.ModelHeader) -> list[dict[str, Any]]:
    """Return every tensor of a GGUF in file order: name, shape in ggml's order, type, bytes."""
    return [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "type": tensor.type,
            "bytes": tensor.nbytes,
        }
        for tensor in header.tensors
    ]


def _role(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    kinds = [tensor.type for tensor in tensors]
    return {
        "tensors": len(tensors),
        "parameters": sum(tensor.elements for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "types": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    }


def empty_facts() -> dict[str, Any]:
    """Return None for every key of FACT_KEYS, for a model that is not on this disk."""
    return dict.fromkeys(FACT_KEYS)


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Return the properties of a checkpoint folder, from its JSON files and the headers of its
    safetensors.

    Unreadable headers are skipped. Pickles are not opened: their file type is "pickled".
    """
    config = read_checkpoint_config(path)
    types: dict[str, dict[str, int]] = {}
    bits = parameters = 0
    for file in sorted(path.glob("*.safetensors")):
        for tensor in _tensors(file):
            count = 1
            for dimension in tensor["shape"]:
                count *= dimension
            row = types.setdefault(tensor["dtype"], {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += count * DTYPE_BITS.get(tensor["dtype"], 8) // 8
            parameters += count
            bits += count * DTYPE_BITS.get(tensor["dtype"], 8)
    architectures, context = config.get("architectures"), config.get("max_position_embeddings")
    tokenizer = _json(path / "tokenizer_config.json")
    unread = "pickled" if pickles.find_pickles(path) else "unknown"
    return {
        "architecture": _word(
            architectures[0] if isinstance(architectures, list) and architectures else None
        ),
        "parameters": parameters,
        "file_type": max(types, key=lambda name: types[name]["bytes"], default=unread),
        "bits_per_weight": round(bits / parameters, 3) if parameters else 0.0,
        "context_length": context if isinstance(context, int) else 0,
        "tokenizer": _word(tokenizer.get("tokenizer_class")),
        "has_template": "chat_template" in tokenizer or (path / "chat_template.jinja").is_file(),
        "types": types,
        "roles": {},
    }


def _word(value: Any) -> str:
    return value if isinstance(value, str) and value else "unknown"


def read_checkpoint_config(path: Path) -> Mapping[str, Any]:
    """Read a checkpoint's config.json; return an empty mapping if it cannot be read."""
    return _json(path / "config.json")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _tensors(file: Path) -> list[dict[str, Any]]:
    """Read the tensor table at the head of a safetensors file (8 bytes of length, then JSON)."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(file.stat().st_size, 100_000_000):
                return []
            table = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError):
        return []
    rows = (
        [value for key, value in table.items() if key != "__metadata__"]
        if isinstance(table, dict)
        else []
    )
    return [
        row
        for row in rows
        if isinstance(row, dict) and isinstance(row.get("dtype"), str) and _sides(row.get("shape"))
    ]


def _sides(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > 8:
        return False
    return all(type(dimension) is int and 0 <= dimension < 1 << 32 for dimension in shape)
