#!/usr/bin/env python3
"""Write a random BF16 Llama checkpoint of a given size, for measurements of speed, memory and disk.

usage: .venv/bin/python scripts/quality/make_checkpoint.py FOLDER --gb 1.5
       --tokenizer TOKENIZER_FOLDER [--hidden 2048] [--shard-gb 1] [--zeros]

The tokenizer's files are copied. With --zeros only the embedding, the output head and the first
block have values. The other blocks are holes in the files, which need no disk space and little time
to quantize.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np

HEAD = 64  # values of an attention head
CHUNK = 1 << 22  # number of random values that are drawn at the same time


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
    args = parser.parse_args()
    assert args.hidden % 256 == 0, "rows must fill k-quants' blocks"
    args.folder.mkdir(parents=True)
    n_vocab = tokenizer(args.tokenizer, args.folder)
    config = make_config(args.hidden, n_vocab, int(args.gb * 1e9))
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))
    shards = split_shards(shapes(config), int(args.shard_gb * 1e9))
    shard_of, rng = {}, np.random.default_rng(0)
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(args.folder / name, tensors, rng, args.zeros)
        shard_of |= dict.fromkeys(tensors, name)
    (args.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shard_of})
    )
    total = sum(nbytes(shape) for tensors in shards for shape in tensors.values())
    print(
        f"{args.folder}: {total / 1e9:.2f} GB, {config['num_hidden_layers']} blocks, {len(shards)} shards"
    )


def tokenizer(source: Path, target: Path) -> int:
    """Copy a tokenizer's files from one folder to another; return its number of tokens."""
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "generation")):
            shutil.copyfile(file, target / file.name)
    model = json.loads((source / "tokenizer.json").read_text())
    added = {token["id"] for token in model.get("added_tokens", [])}
    return max(*model["model"]["vocab"].values(), *added) + 1


def make_config(hidden: int, n_vocab: int, total: int) -> dict[str, object]:
    """Return the content of config.json, with as many blocks as fill `total` bytes."""
    ff, kv = -(-hidden * 8 // 3 // 256) * 256, max(1, hidden // HEAD // 4)
    block = 2 * (2 * hidden * hidden + 2 * kv * HEAD * hidden + 3 * hidden * ff + 2 * hidden)
    layers = max(1, (total - 4 * n_vocab * hidden) // block)
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
        "vocab_size": n_vocab,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, in the order of the files."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_key_value_heads",
        "vocab_size",
        "num_hidden_layers",
    )
    hidden, ff, kv, n_vocab, layers = (int(str(config[key])) for key in keys)
    table: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (n_vocab, hidden),
        "model.embed_tokens.weight": (n_vocab, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        table |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.mlp.down_proj.weight": (hidden, ff),
            f"{prefix}.mlp.gate_proj.weight": (ff, hidden),
            f"{prefix}.mlp.up_proj.weight": (ff, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.k_proj.weight": (kv * HEAD, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv * HEAD, hidden),
        }
    return table | {"model.norm.weight": (hidden,)}


def split_shards(table: dict[str, tuple[int, ...]], limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Divide tensors into shards of at most `limit` bytes. A larger tensor is a shard alone."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in table.items():
        if shards[-1] and sum(map(nbytes, shards[-1].values())) + nbytes(shape) > limit:
            shards.append({})
        shards[-1][name] = shape
    return shards


def nbytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a BF16 tensor of this shape."""
    return int(np.prod(shape)) * 2


def write(
    file: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator, zeros: bool
) -> None:
    """Write a safetensors file of random BF16 tensors. `zeros`: leave the tensors of all blocks but
    the first as holes.
    """
    header, offset = {}, 0
    for name, shape in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes(shape)],
        }
        offset += nbytes(shape)
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
            remaining = nbytes(shape) // 2
            while remaining:
                values = rng.standard_normal(min(remaining, CHUNK), np.float32) * np.float32(
                    0.02
                ) + (len(shape) == 1)
                out.write(
                    (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
                )
                remaining -= len(values)
        out.truncate(8 + len(text) + offset)


if __name__ == "__main__":
    main()
