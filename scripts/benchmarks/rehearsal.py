#!/usr/bin/env python3
"""Measure what the rehearsal of a new model file costs, and what a saved verdict costs.

usage: .venv/bin/python scripts/benchmarks/rehearsal.py [MODEL.gguf …] [--rounds 5] [--folder DIR]

Besides the given files, a stand-in for a model of 8 billion parameters is measured: a sparse file
with the sizes, types and vocabulary of Llama 3.1 8B in Q4_K_M. All files are read once before, so
that their pages are cached. Each round rehearses in a new home folder. The time of a saved verdict
is that of a call in this process, after the header has been read. The script prints one JSON line a
file, with medians in seconds and milliseconds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.config import load_config
from llmcli.model_loader.rehearsal import rehearse
from llmcli.runtime.binding.library import lib
from llmcli.ui import UI
from quant.gguf import layout
from quant.model_file.read_header import read_header

BLOCKS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, HEAD_SIZE = 32, 4096, 14336, 32, 8, 128
TOKENS, MERGES = 128256, 280147
KEPT_CALLS = 200


def write_stand_in(path: Path) -> Path:
    """Write a sparse file with the header of an 8B model, and return its path."""
    entry = layout.encode_entry
    numbers = {
        "block_count": BLOCKS,
        "context_length": 131072,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_SIZE,
        "vocab_size": TOKENS,
    }
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    words = [a + b for a in letters for b in letters] + [
        a + b + c for a in letters[:40] for b in letters[:40] for c in letters[:40]
    ]
    tokens = [*letters, *words[: TOKENS - 256 - 256], *(f"<|reserved_{i}|>" for i in range(256))]
    merges = [f"{a} {b}" for a in letters for b in letters]
    merges += [f"{a}{b} {c}" for a in letters[:64] for b in letters[:64] for c in letters[:64]]
    entries = [
        ("general.architecture", entry("string", "llama")),
        ("general.file_type", entry("uint32", 15)),
        *((f"llama.{key}", entry("uint32", value)) for key, value in numbers.items()),
        ("llama.attention.layer_norm_rms_epsilon", entry("float32", 1e-5)),
        ("llama.rope.freq_base", entry("float32", 500000.0)),
        ("tokenizer.ggml.model", entry("string", "gpt2")),
        ("tokenizer.ggml.pre", entry("string", "llama-bpe")),
        ("tokenizer.ggml.tokens", entry("array:string", tokens)),
        ("tokenizer.ggml.token_type", entry("array:int32", [1] * (TOKENS - 256) + [3] * 256)),
        ("tokenizer.ggml.merges", entry("array:string", merges[:MERGES])),
        ("tokenizer.ggml.bos_token_id", entry("uint32", TOKENS - 256)),
        ("tokenizer.ggml.eos_token_id", entry("uint32", TOKENS - 255)),
    ]
    tensors: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (WIDTH, TOKENS), "Q4_K"),
        ("output_norm.weight", (WIDTH,), "F32"),
        ("output.weight", (WIDTH, TOKENS), "Q6_K"),
    ]
    for block in range(BLOCKS):
        better = "Q6_K" if block < 4 or block > 27 or block % 3 == 2 else "Q4_K"
        tensors += [
            (f"blk.{block}.{name}.weight", shape, kind)
            for name, shape, kind in (
                ("attn_norm", (WIDTH,), "F32"),
                ("attn_q", (WIDTH, HEADS * HEAD_SIZE), "Q4_K"),
                ("attn_k", (WIDTH, KV_HEADS * HEAD_SIZE), "Q4_K"),
                ("attn_v", (WIDTH, KV_HEADS * HEAD_SIZE), better),
                ("attn_output", (HEADS * HEAD_SIZE, WIDTH), "Q4_K"),
                ("ffn_norm", (WIDTH,), "F32"),
                ("ffn_gate", (WIDTH, FEED_FORWARD), "Q4_K"),
                ("ffn_up", (WIDTH, FEED_FORWARD), "Q4_K"),
                ("ffn_down", (FEED_FORWARD, WIDTH), better),
            )
        ]
    plan = layout.lay_out_file(entries, tensors, 32)
    path.write_bytes(plan.header)
    os.truncate(path, plan.nbytes)
    return path


def read_once(path: Path) -> None:
    """Read a file, so that its pages are cached."""
    with path.open("rb") as stream:
        while stream.read(1 << 24):
            pass


def measure(path: Path, rounds: int) -> dict[str, object]:
    """Return the seconds of first rehearsals of a file, and the milliseconds of saved verdicts."""
    read_once(path)
    header = read_header(path)
    firsts: list[float] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as home, Path(os.devnull).open("w") as null:
            config = load_config({"LLMCLI_HOME": home, "HOME": home})
            with redirect_stderr(null):
                start = time.perf_counter()
                rehearse.rehearse_model(header, config, UI(), uses_template=True)
                firsts.append(time.perf_counter() - start)
                kept = []
                for _ in range(KEPT_CALLS):
                    start = time.perf_counter()
                    rehearse.rehearse_model(header, config, UI(), uses_template=True)
                    kept.append((time.perf_counter() - start) * 1e3)
    return {
        "file": path.name,
        "gigabytes": round(header.tensor_bytes / 1e9, 2),
        "first seconds": round(statistics.median(firsts), 2),
        "longest first seconds": round(max(firsts), 2),
        "kept milliseconds": round(statistics.median(kept), 2),
        "longest kept milliseconds": round(max(kept), 2),
    }


def main() -> None:
    """Measure the given files and the stand-in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write the stand-in")
    args = parser.parse_args()
    lib()  # a command has loaded llama.cpp when it asks for a verdict, or loads it right after
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        stand_in = write_stand_in(Path(folder) / "stand-in-8b.gguf")
        for path in (*args.models, stand_in):
            print(json.dumps(measure(path, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
