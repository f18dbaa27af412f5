#!/usr/bin/env python3
"""Write a GGUF file with random weights in the shape of Llama 3 8B, as Q4_K_M (4.6 GiB). Its answers
are meaningless; its speed is that of the real model.

usage: .venv/bin/python scripts/laboratory/random_8b.py OUT.gguf [--layers 32] [--words 128256]
       [--float]

With --float the weights are F16. One layer of them is enough to measure what the quantization of a
layer costs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

sys.path.insert(0, str(Path(__file__).parents[2]))

from quant.native import ggml

LAYERS, WIDTH, FORWARD, HEADS, KV_WIDTH, TOKENS = 32, 4096, 14336, 32, 1024, 128_256
DISTINCT_ROWS = 128  # each matrix repeats so many random rows


def random_weights(
    rows: int, columns: int, kind: Type
) -> "np.ndarray[tuple[int, int], np.dtype[Any]]":
    """Return a matrix of this type, one line for each row: the bytes of blocks, or F16 values."""
    numbers = np.random.default_rng(rows + columns).standard_normal(
        (DISTINCT_ROWS, columns), dtype=np.float32
    )
    if kind is Type.F16:
        return np.tile((numbers * np.float32(0.02)).astype(np.float16), (rows // DISTINCT_ROWS, 1))
    encoded = ggml.encode(numbers * np.float32(0.02), kind.name, label="random weights")
    encoded = encoded.reshape(DISTINCT_ROWS, -1)
    return np.tile(encoded, (rows // DISTINCT_ROWS, 1))


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether Q4_K_M gives attn_v and ffn_down of a layer Q6_K (llama.cpp, use_more_bits)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def raw(kind: Type) -> Type | None:
    """Return the type that the writer must be told: that of bytes, None for values."""
    return None if kind is Type.F16 else kind


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", metavar="OUT.gguf")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--words", type=int, default=TOKENS, help=f"a multiple of {DISTINCT_ROWS}")
    parser.add_argument("--float", action="store_true", help="F16 instead of Q4_K_M")
    args = parser.parse_args()
    layers, tokens = args.layers, args.words
    few, many = (Type.F16, Type.F16) if args.float else (Type.Q4_K, Type.Q6_K)
    writer = gguf.GGUFWriter(args.out, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_WIDTH // (WIDTH // HEADS))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(tokens)
    file_types = gguf.LlamaFileType
    writer.add_file_type(file_types.MOSTLY_F16 if args.float else file_types.MOSTLY_Q4_K_M)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names + [f"▁{number}" for number in range(tokens - len(names))])
    writer.add_token_scores([0.0] * tokens)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (tokens - len(kinds)))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, rows, kind in [("token_embd", tokens, few), ("output", tokens, many)]:
        writer.add_tensor(f"{name}.weight", random_weights(rows, WIDTH, kind), raw_dtype=raw(kind))
    ones = np.ones(WIDTH, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(layers):
        some = many if has_more_bits(layer, layers) else few
        for name, rows, columns, kind in [
            ("attn_q", WIDTH, WIDTH, few),
            ("attn_k", KV_WIDTH, WIDTH, few),
            ("attn_v", KV_WIDTH, WIDTH, some),
            ("attn_output", WIDTH, WIDTH, few),
            ("ffn_gate", FORWARD, WIDTH, few),
            ("ffn_up", FORWARD, WIDTH, few),
            ("ffn_down", WIDTH, FORWARD, some),
        ]:
            weights = random_weights(rows, columns, kind)
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights, raw_dtype=raw(kind))
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
