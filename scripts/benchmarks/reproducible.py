#!/usr/bin/env python3
"""Measure how much the batch changes the logits, and what the reproducible mode costs.

usage: .venv/bin/python scripts/benchmarks/reproducible.py MODEL.gguf [MODEL.gguf ...]
       [--cache q8_0] [--as-is] [--depths 100,700] [--chunks 1,2,3,4,7,16,63,64,65,128]
       [--sequences 2,3,4,5,8] [--layout best|file] [--tiled]

The script prints the largest |Δlogit| over the prompt's last token and four more, against the same
text computed alone, in one pass, with one thread: for prompts in chunks, two threads, other
micro-batches, several sequences in a batch, and cells after a gap that was filled. Then it prints
the CPU milliseconds of 512 prompt tokens and of one more token. --as-is leaves out the reproducible
mode (llmcli/runtime/reproducible.py) and uses llama.cpp's default cache and kernels. --layout file
keeps the matrices as the file has them, --tiled enables the tiled kernel of k-quants.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcli import config
from llmcli.runtime import kv_size, reproducible
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from quant.model_file import read_header

MORE = 4  # tokens after the prompt, one per pass
Found = list[NDArray[np.float32]]


def feed(context: Context, tokens: list[int], chunk: int, slot: int = 0, start: int = 0) -> Found:
    """Return the logits of the prompt's last token and a few more; the first `start` tokens are
    cached.
    """
    end, found = len(tokens) - MORE, []
    pieces = [(at, min(at + chunk, end)) for at in range(start, end, chunk)] + [
        (at, at + 1) for at in range(end, end + MORE)
    ]
    for at, to in pieces:
        wants = [False] * (to - at - 1) + [True]
        (row,) = context.decode(BatchRows(tokens[at:to], range(at, to), [slot] * (to - at), wants))
        found.append(row.logits.copy())
    return found[-MORE - 1 :]


def apart(one: Found, other: Found) -> float:
    """Return the largest difference of any logit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def together(context: Context, texts: list[list[int]]) -> list[Found]:
    """Compute several sequences whose last tokens share their passes."""
    ends = [len(text) - MORE for text in texts]
    found: list[Found] = []
    for slot, (text, end) in enumerate(zip(texts, ends, strict=True)):
        (row,) = context.decode(
            BatchRows(text[:end], range(end), [slot] * end, [False] * (end - 1) + [True])
        )
        found.append([row.logits.copy()])
    for step in range(MORE):
        places = [end + step for end in ends]
        tokens = [text[place] for text, place in zip(texts, places, strict=True)]
        rows = context.decode(BatchRows(tokens, places, range(len(texts)), [True] * len(texts)))
        for mine, row in zip(found, rows, strict=True):
            mine.append(row.logits.copy())
    return found


def behind_a_hole(context: Context, tokens: list[int]) -> Found:
    """Compute a text whose cells are split by a gap: another text was removed before its end."""
    half = len(tokens) // 2
    other = tokens[: half // 2]
    context.decode(BatchRows(other, range(len(other)), [1] * len(other), [False] * len(other)))
    context.decode(BatchRows(tokens[:half], range(half), [0] * half, [False] * half))
    context.trim(1, 0)
    return feed(context, tokens, 512, start=half)


def cases(path: Path, asked: argparse.Namespace, depth: int) -> Iterator[tuple[str, float]]:
    """Yield every way to split the text, and its largest difference."""
    text = words(path, depth + MORE + 9 * max(asked.sequences))
    tokens = text[: depth + MORE]
    fit = kv_size.round_up_cells(depth + MORE)
    with opened(path, asked, n_ctx=fit) as context:
        alone = feed(context, tokens, 512)
        for chunk in asked.chunks:
            context.clear()
            yield f"chunks of {chunk}", apart(feed(context, tokens, chunk), alone)
    with opened(path, asked, n_ctx=fit, threads=2) as context:
        yield "2 threads", apart(feed(context, tokens, 512), alone)
    for n_ubatch in (33, 64, 128):
        with opened(path, asked, n_ctx=fit, n_ubatch=n_ubatch) as context:
            yield f"micro-batches of {n_ubatch}", apart(feed(context, tokens, 512), alone)
    for count in asked.sequences:
        texts = [text[9 * slot : 9 * slot + len(tokens) - 3 * slot] for slot in range(count)]
        with opened(path, asked, n_ctx=count * fit, slots=count) as context:
            found = together(context, texts)
        with opened(path, asked, n_ctx=fit) as context:
            singly = []
            for one in texts:
                context.clear()
                singly.append(feed(context, one, 512))
        yield f"{count} sequences", max(map(apart, found, singly))
    with opened(path, asked, n_ctx=2 * fit, slots=2) as context:
        yield "cells behind a hole", apart(behind_a_hole(context, tokens), alone)


@contextmanager
def opened(
    path: Path,
    asked: argparse.Namespace,
    *,
    n_ctx: int,
    threads: int = 1,
    n_ubatch: int = 512,
    slots: int = 1,
) -> Iterator[Context]:
    """Open a context in the reproducible mode, or with --as-is or --layout file without it."""
    kind = ContextOptions(
        n_ctx, 2048, n_ubatch, slots, threads, threads, asked.cache, asked.cache, "on"
    )
    if not asked.as_is and asked.layout == "best":
        with reproducible.open_reproducible(read_header.read_header(path), kind) as (_, context):
            yield context
    else:
        repack = asked.layout == "best"
        with (
            open_model(path, gpu_layers=0, repack=repack) as model,
            open_context(model, kind) as context,
        ):
            yield context


def words(path: Path, count: int) -> list[int]:
    """Return tokens of a real text."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    with open_model(path, vocab_only=True) as model:
        ids = model.tokenize(text, special=False, add_special=model.add_bos)
    return (ids * (count // len(ids) + 1))[:count]


def cost(path: Path, asked: argparse.Namespace) -> tuple[float, float]:
    """Return the CPU milliseconds of 512 prompt tokens and of one more token, the minimum of four
    runs.
    """
    tokens = words(path, 512 + 16)
    prompt, single = [], []
    with opened(path, asked, n_ctx=1024) as context:
        for _ in range(4):
            context.clear()
            begun = time.process_time()
            context.decode(BatchRows(tokens[:512], range(512), [0] * 512, [False] * 511 + [True]))
            prompt.append(time.process_time() - begun)
            begun = time.process_time()
            for at in range(512, 528):
                context.decode(BatchRows([tokens[at]], [at], [0], [True]))
            single.append((time.process_time() - begun) / 16)
    return min(prompt) * 1e3, min(single) * 1e3


def numbers(text: str) -> list[int]:
    """Parse '1,2,3'."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--cache", default=reproducible.CACHE_TYPE)
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--layout", choices=("best", "file"), default="best")
    parser.add_argument("--tiled", action="store_true")
    parser.add_argument("--depths", type=numbers, default=[100, 700])
    parser.add_argument("--chunks", type=numbers, default=[1, 2, 3, 4, 7, 16, 63, 64, 65, 128])
    parser.add_argument("--sequences", type=numbers, default=[2, 3, 4, 5, 8])
    asked = parser.parse_args()
    if not asked.as_is and not asked.tiled:
        config.disable_tiled_kernels()
    for path in asked.models:
        how = "default" if asked.as_is else "reproducible"
        print(f"{path.name}  {how}, {asked.cache} cache, {asked.layout} layout", flush=True)
        for depth in asked.depths:
            for case, difference in cases(path, asked, depth):
                print(f"  {depth:5} tokens  {case:24} {difference:.3g}", flush=True)
        prompt, single = cost(path, asked)
        print(
            f"  512 tokens {prompt:.0f} ms, one more {single:.2f} ms (CPU time, one thread)",
            flush=True,
        )


if __name__ == "__main__":
    main()
