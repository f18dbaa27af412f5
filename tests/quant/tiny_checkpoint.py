"""Checkpoint folders for tests: safetensors files, changed copies, and larger random models."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np


def save(file: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> Path:
    """Write F32 arrays as a safetensors file of type `dtype`, and return `file`.

    BF16 truncates: it takes the upper 16 bits of each float.
    """
    header: dict[str, Any] = {}
    blobs, offset = [], 0
    for name, values in tensors.items():
        blob = encode(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return file


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of an array as F32, F16 or BF16."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def copy(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy a folder, change values of its config.json, and return `target`. None removes a key."""
    shutil.copytree(folder, target)
    edit(target / "config.json", **changes)
    return target


def random_llama(
    folder: Path,
    target: Path,
    *,
    hidden: int = 512,
    layers: int = 4,
    shards: int = 3,
    seed: int = 0,
) -> Path:
    """Write a larger Llama with random BF16 weights in several shards, and return `target`.

    Its other settings and its tokenizer are those of `folder`.
    """
    ff, rng = hidden * 11 // 4, np.random.default_rng(seed)
    copy(
        folder,
        target,
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        head_dim=hidden // 8,
    )
    (target / "model.safetensors").unlink()
    config = json.loads((target / "config.json").read_text())
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ff, hidden),
        "mlp.up_proj": (ff, hidden),
        "mlp.down_proj": (hidden, ff),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    shapes |= {
        f"model.layers.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in block.items()
    }
    names, weight_map = sorted(shapes), {}
    for number in range(shards):
        shard = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        shard_names = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        values = {
            f"{name}.weight": rng.standard_normal(shapes[name], np.float32) * 0.05
            for name in shard_names
        }
        save(target / shard, values, "BF16")
        weight_map |= dict.fromkeys(values, shard)
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return target


def edit(file: Path, **changes: Any) -> None:
    """Change values of the JSON object in a file, which may not exist. None removes a key."""
    values = json.loads(file.read_text()) if file.exists() else {}
    values = {key: value for key, value in (values | changes).items() if value is not None}
    file.write_text(json.dumps(values))


def read(file: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a safetensors file in F32, by name."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return {
        name: np.frombuffer(
            data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]],
            np.float32,
        ).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
