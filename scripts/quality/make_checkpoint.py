#!/usr/bin/env python3
"""Write a random BF16 Llama checkpoint of a given size, to measure speed, memory and disk.

usage: .venv/bin/python scripts/quality/make_checkpoint.py FOLDER --gb 1.5
       --tokenizer TOKENIZER_FOLDER [--hidden 2048] [--shard-gb 1] [--zeros]

The tokenizer's files are copied. With --zeros only the embedding, the head and the first block have
values; the rest are holes in the files, which take neither disk nor much time to quantize.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np

HEAD = 64  # values of an attention head
CHUNK = 1 << 22  # values drawn at a time


def main() -> None:
    """Plan the tensors, distribute them over shards, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 256")
    parser.add_argument("--shard-gb", type=float, default=1.0)
    parser.add_argument("--zeros", action="store_true")
    asked = parser.parse_args()
    assert asked.hidden % 256 == 0, "rows must fill k-quants' blocks"
    asked.folder.mkdir(parents=True)
    words = tokenizer(asked.tokenizer, asked.folder)
    config = settings(asked.hidden, words, int(asked.gb * 1e9))
    (asked.folder / "config.json").write_text(json.dumps(config, indent=1))
    shards = spread(shapes(config), int(asked.shard_gb * 1e9))
    places, rng = {}, np.random.default_rng(0)
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(asked.folder / name, tensors, rng, asked.zeros)
        places |= dict.fromkeys(tensors, name)
    (asked.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    total = sum(nbytes(shape) for tensors in shards for shape in tensors.values())
    print(
        f"{asked.folder}: {total / 1e9:.2f} GB, {config['num_hidden_layers']} blocks, {len(shards)} shards"
    )


def tokenizer(source: Path, target: Path) -> int:
    """Copy a tokenizer's files; return its number of tokens."""
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "generation")):
            shutil.copyfile(file, target / file.name)
    model = json.loads((source / "tokenizer.json").read_text())
    added = {token["id"] for token in model.get("added_tokens", [])}
    return max(*model["model"]["vocab"].values(), *added) + 1


def settings(hidden: int, words: int, total: int) -> dict[str, object]:
    """Return a config.json with enough blocks for `total` bytes."""
    ff, kv = -(-hidden * 8 // 3 // 256) * 256, max(1, hidden // HEAD // 4)
    block = 2 * (2 * hidden * hidden + 2 * kv * HEAD * hidden + 3 * hidden * ff + 2 * hidden)
    layers = max(1, (total - 4 * words * hidden) // block)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": kv,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": words,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Return every tensor's name and shape in file order."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_key_value_heads",
        "vocab_size",
        "num_hidden_layers",
    )
    hidden, ff, kv, words, layers = (int(str(config[key])) for key in keys)
    table: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (words, hidden),
        "model.embed_tokens.weight": (words, hidden),
    }
    for layer in range(layers):
        place = f"model.layers.{layer}"
        table |= {
            f"{place}.input_layernorm.weight": (hidden,),
            f"{place}.mlp.down_proj.weight": (hidden, ff),
            f"{place}.mlp.gate_proj.weight": (ff, hidden),
            f"{place}.mlp.up_proj.weight": (ff, hidden),
            f"{place}.post_attention_layernorm.weight": (hidden,),
            f"{place}.self_attn.k_proj.weight": (kv * HEAD, hidden),
            f"{place}.self_attn.o_proj.weight": (hidden, hidden),
            f"{place}.self_attn.q_proj.weight": (hidden, hidden),
            f"{place}.self_attn.v_proj.weight": (kv * HEAD, hidden),
        }
    return table | {"model.norm.weight": (hidden,)}


def spread(table: dict[str, tuple[int, ...]], limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Return tensors in shards of at most `limit` bytes, or of one tensor."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in table.items():
        if shards[-1] and sum(map(nbytes, shards[-1].values())) + nbytes(shape) > limit:
            shards.append({})
        shards[-1][name] = shape
    return shards


def nbytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a BF16 tensor."""
    return int(np.prod(shape)) * 2


def write(
    file: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator, zeros: bool
) -> None:
    """Write one safetensors file."""
    header, at = {}, 0
    for name, shape in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [at, at + nbytes(shape)],
        }
        at += nbytes(shape)
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors.items():
            if (
                zeros
                and name.startswith("model.layers.")
                and not name.startswith("model.layers.0.")
            ):
                out.seek(nbytes(shape), 1)
                continue
            rest = nbytes(shape) // 2
            while rest:
                values = rng.standard_normal(min(rest, CHUNK), np.float32) * np.float32(0.02) + (
                    len(shape) == 1
                )
                out.write(
                    (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
                )
                rest -= len(values)
        out.truncate(8 + len(text) + at)


if __name__ == "__main__":
    main()
