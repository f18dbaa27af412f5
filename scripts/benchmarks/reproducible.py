#!/usr/bin/env python3
"""Measure how much batch composition changes the logits, and what the reproducible mode costs.

usage: .venv/bin/python scripts/benchmarks/reproducible.py MODEL.gguf [MODEL.gguf ...]
       [--cache q8_0] [--as-is] [--depths 100,700] [--chunks 1,2,3,4,7,16,63,64,65,128]
       [--sequences 2,3,4,5,8] [--layout best|file] [--tiled]

The reference is a text computed alone, in one pass, with one thread. The same text is computed in
other ways: the prompt in chunks, two threads, other micro-batches, several sequences in a batch,
and KV cells with a gap between them. For each way the script prints the largest |Δlogit| over the
prompt's last token and the four tokens after it. Then it prints the CPU milliseconds of 512 prompt
tokens and of one more token. --as-is switches the reproducible mode
(llmcli/runtime/reproducible.py) off. --layout file loads the matrices in the layout of the file
instead of repacked. --tiled enables the tiled kernel of k-quants.
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
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.binding.rows.batch import BatchRows
from quant.model_file import read_header

EXTRA_TOKENS = 4  # tokens after the prompt, one per pass
Logits = list[NDArray[np.float32]]


def feed(context: Context, tokens: list[int], chunk: int, slot: int = 0, start: int = 0) -> Logits:
    """Compute `tokens` as sequence `slot`: the prompt in passes of `chunk` tokens, then the last
    EXTRA_TOKENS one at a time. Return the logits of the prompt's last token and of the extra
    tokens. The first `start` tokens are in the cache already.
    """
    end, logits = len(tokens) - EXTRA_TOKENS, []
    pieces = [
        (start_of_pass, min(start_of_pass + chunk, end))
        for start_of_pass in range(start, end, chunk)
    ] + [(start_of_pass, start_of_pass + 1) for start_of_pass in range(end, end + EXTRA_TOKENS)]
    for start_of_pass, end_of_pass in pieces:
        wants = [False] * (end_of_pass - start_of_pass - 1) + [True]
        (row,) = context.decode(
            BatchRows(
                tokens[start_of_pass:end_of_pass],
                range(start_of_pass, end_of_pass),
                [slot] * (end_of_pass - start_of_pass),
                wants,
            )
        )
        logits.append(row.logits.copy())
    return logits[-EXTRA_TOKENS - 1 :]


def max_difference(first: Logits, second: Logits) -> float:
    """Return the largest absolute difference between the logits of the same token and id."""
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


def decode_together(context: Context, texts: list[list[int]]) -> list[Logits]:
    """Compute several texts as sequences of one context. The last EXTRA_TOKENS tokens of all texts
    share passes, one row per text. Return the logits of each text.
    """
    ends = [len(text) - EXTRA_TOKENS for text in texts]
    logits: list[Logits] = []
    for slot, (text, end) in enumerate(zip(texts, ends, strict=True)):
        (row,) = context.decode(
            BatchRows(text[:end], range(end), [slot] * end, [False] * (end - 1) + [True])
        )
        logits.append([row.logits.copy()])
    for step in range(EXTRA_TOKENS):
        positions = [end + step for end in ends]
        tokens = [text[position] for text, position in zip(texts, positions, strict=True)]
        rows = context.decode(BatchRows(tokens, positions, range(len(texts)), [True] * len(texts)))
        for logits_of_text, row in zip(logits, rows, strict=True):
            logits_of_text.append(row.logits.copy())
    return logits


def decode_after_gap(context: Context, tokens: list[int]) -> Logits:
    """Compute a text whose KV cells have a gap. Another sequence is computed first and removed when
    half of the text is in the cache.
    """
    half = len(tokens) // 2
    removed = tokens[: half // 2]
    context.decode(
        BatchRows(removed, range(len(removed)), [1] * len(removed), [False] * len(removed))
    )
    context.decode(BatchRows(tokens[:half], range(half), [0] * half, [False] * half))
    context.trim(1, 0)
    return feed(context, tokens, 512, start=half)


def cases(path: Path, args: argparse.Namespace, depth: int) -> Iterator[tuple[str, float]]:
    """Yield the name of every way to compute a text of `depth` prompt tokens, and the largest
    difference of its logits from those of the text computed alone.
    """
    text = sample_tokens(path, depth + EXTRA_TOKENS + 9 * max(args.sequences))
    tokens = text[: depth + EXTRA_TOKENS]
    fit = kv_size.round_up_cells(depth + EXTRA_TOKENS)
    with open_reproducible_or_plain(path, args, n_ctx=fit) as context:
        alone = feed(context, tokens, 512)
        for chunk in args.chunks:
            context.clear()
            yield f"chunks of {chunk}", max_difference(feed(context, tokens, chunk), alone)
    with open_reproducible_or_plain(path, args, n_ctx=fit, threads=2) as context:
        yield "2 threads", max_difference(feed(context, tokens, 512), alone)
    for n_ubatch in (33, 64, 128):
        with open_reproducible_or_plain(path, args, n_ctx=fit, n_ubatch=n_ubatch) as context:
            yield f"micro-batches of {n_ubatch}", max_difference(feed(context, tokens, 512), alone)
    for count in args.sequences:
        texts = [text[9 * slot : 9 * slot + len(tokens) - 3 * slot] for slot in range(count)]
        with open_reproducible_or_plain(path, args, n_ctx=count * fit, slots=count) as context:
            batched = decode_together(context, texts)
        with open_reproducible_or_plain(path, args, n_ctx=fit) as context:
            alone_each = []
            for tokens_alone in texts:
                context.clear()
                alone_each.append(feed(context, tokens_alone, 512))
        yield f"{count} sequences", max(map(max_difference, batched, alone_each))
    with open_reproducible_or_plain(path, args, n_ctx=2 * fit, slots=2) as context:
        yield "cells behind a hole", max_difference(decode_after_gap(context, tokens), alone)


@contextmanager
def open_reproducible_or_plain(
    path: Path,
    args: argparse.Namespace,
    *,
    n_ctx: int,
    threads: int = 1,
    n_ubatch: int = 512,
    slots: int = 1,
) -> Iterator[Context]:
    """Open a context in the reproducible mode. With --as-is or --layout file, open it without that
    mode.
    """
    options = ContextOptions(
        n_ctx, 2048, n_ubatch, slots, threads, threads, args.cache, args.cache, "on"
    )
    if not args.as_is and args.layout == "best":
        with reproducible.open_reproducible(read_header.read_header(path), options) as (_, context):
            yield context
    else:
        repack = args.layout == "best"
        with (
            open_model(path, ModelPlacement(0, repack=repack)) as model,
            open_context(model, options) as context,
        ):
            yield context


def sample_tokens(path: Path, count: int) -> list[int]:
    """Return `count` tokens of README.md, which is repeated if it is too short."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    with open_model(path, vocab_only=True) as model:
        ids = model.tokenize(text, special=False, add_special=model.add_bos)
    return (ids * (count // len(ids) + 1))[:count]


def cost(path: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Return the CPU milliseconds of a prompt of 512 tokens, and of one token after it. Both are
    the minimum of four runs.
    """
    tokens = sample_tokens(path, 512 + 16)
    prompt, single = [], []
    with open_reproducible_or_plain(path, args, n_ctx=1024) as context:
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


def parse_numbers(text: str) -> list[int]:
    """Parse comma-separated integers, such as "1,2,3"."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Parse the flags, measure every model and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--cache", default=reproducible.CACHE_TYPE)
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--layout", choices=("best", "file"), default="best")
    parser.add_argument("--tiled", action="store_true")
    parser.add_argument("--depths", type=parse_numbers, default=[100, 700])
    parser.add_argument(
        "--chunks", type=parse_numbers, default=[1, 2, 3, 4, 7, 16, 63, 64, 65, 128]
    )
    parser.add_argument("--sequences", type=parse_numbers, default=[2, 3, 4, 5, 8])
    args = parser.parse_args()
    if not args.as_is and not args.tiled:
        config.disable_tiled_kernels()
    for path in args.models:
        mode = "default" if args.as_is else "reproducible"
        print(f"{path.name}  {mode}, {args.cache} cache, {args.layout} layout", flush=True)
        for depth in args.depths:
            for case, difference in cases(path, args, depth):
                print(f"  {depth:5} tokens  {case:24} {difference:.3g}", flush=True)
        prompt, single = cost(path, args)
        print(
            f"  512 tokens {prompt:.0f} ms, one more {single:.2f} ms (CPU time, one thread)",
            flush=True,
        )


if __name__ == "__main__":
    main()
