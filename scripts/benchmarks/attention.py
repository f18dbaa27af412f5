#!/usr/bin/env python3
"""Compare this project's attention with ggml's: a token after many others, and a long prompt.

usage: .venv/bin/python scripts/benchmarks/attention.py FILE.gguf ... [--depths 2048,8192]
       [--types f16,q8_0,q4_0] [--threads 2] [--rounds 7] [--prompts | --ggml-products]

For each file, cache type and depth, a context computes tokens after `depth` others, with llmcli's
attention and with ggml's in turn; both use llmcli's products. The script prints the milliseconds of
a token with both (medians of the rounds), the ratio of the medians (ggml's time / ours) with the
lowest and the highest ratio of a round, and the relative squared error of our logits against
ggml's. --prompts also computes the first `depth` tokens once with each, and prints the ratio of the
times: ggml takes long for quantized caches.

With --ggml-products, ggml's side uses ggml's products, too, as llama-bench does: a second model
with ggml's layouts of weights, whose context gets a copy of the cache. llama-bench itself would
compute the `depth` tokens first, for many minutes.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows

PASS_TOKENS, TOKENS = 512, 3  # of a pass of the prompt, and in a round


def main() -> None:
    """Parse the flags, and measure every file, cache type and depth."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--depths", default="2048,8192")
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-t", "--threads", type=int, default=2)
    sides = parser.add_mutually_exclusive_group()
    sides.add_argument("--prompts", action="store_true")
    sides.add_argument("--ggml-products", action="store_true")
    args = parser.parse_args()
    print(
        "file                 cache  depth   ms ours    ggml   ratio (of the rounds)   logit error"
    )
    for path in args.files:
        with ExitStack() as stack:
            models = {True: stack.enter_context(open_model(path, ON_HOST))}
            models[False] = (
                stack.enter_context(open_model(path, replace(ON_HOST, ggml_products=True)))
                if args.ggml_products
                else models[True]
            )
            for kind in args.types.split(","):
                for depth in (int(word) for word in args.depths.split(",")):
                    compare(models, path.stem, kind, depth, args)


def compare(
    models: dict[bool, Model], name: str, kind: str, depth: int, args: argparse.Namespace
) -> None:
    """Measure one cache type and depth, and print a line. `models`: ours, and ggml's side's."""
    options = ContextOptions(
        depth + TOKENS,
        2048,
        PASS_TOKENS,
        1,
        args.threads,
        args.threads,
        kind,
        kind,
        flash_attn="on",
    )
    with ExitStack() as stack:
        context = stack.enter_context(open_context(models[True], options))
        contexts = {True: context, False: context}
        fills = [fill(context, depth, own) for own in ((False, True) if args.prompts else (True,))]
        if args.ggml_products:
            contexts[False] = stack.enter_context(open_context(models[False], options))
            assert contexts[False].write_state(0, context.read_state(0))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        logits = dict.fromkeys(seconds, np.empty(0))
        order = [True, False]
        for round_number in range(args.rounds + 1):
            for own in order:
                took, logits[own] = timed_tokens(contexts[own], depth, own)
                if round_number:
                    seconds[own].append(took)
            order.reverse()
    medians = {own: statistics.median(each) for own, each in seconds.items()}
    ratios = [other / one for one, other in zip(seconds[True], seconds[False], strict=True)]
    error = np.square(logits[True] - logits[False]).sum() / np.square(logits[False]).sum()
    print(
        f"{name[:20]:20} {kind:5} {depth:6} {medians[True] * 1e3:9.1f} {medians[False] * 1e3:7.1f}   "
        f"{medians[False] / medians[True]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})   {error:.1e}"
        + (f"   prompt {fills[0] / fills[1]:.2f}" if args.prompts else ""),
        flush=True,
    )


def fill(context: Context, depth: int, own: bool) -> float:
    """Compute `depth` tokens of an empty context, and return the seconds."""
    products.use_attention(own=own)
    context.clear()
    start_time = time.perf_counter()
    for first in range(0, depth, PASS_TOKENS):
        positions = range(first, min(first + PASS_TOKENS, depth))
        tokens = [11 + 37 * position % 997 for position in positions]
        context.decode(BatchRows(tokens, positions, [0] * len(tokens), [False] * len(tokens)))
    return time.perf_counter() - start_time


def timed_tokens(context: Context, depth: int, own: bool) -> tuple[float, NDArray[np.float64]]:
    """Compute TOKENS tokens after `depth` others. Return the seconds of one, and the last logits."""
    products.use_attention(own=own)
    context.trim(0, depth)
    start_time = time.perf_counter()
    for index in range(TOKENS):
        outputs = context.decode(BatchRows([5 + index], [depth + index], [0], [True]))
    seconds = (time.perf_counter() - start_time) / TOKENS
    return seconds, outputs[-1].logits.astype(np.float64)


if __name__ == "__main__":
    main()
