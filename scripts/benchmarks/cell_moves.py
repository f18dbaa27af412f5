#!/usr/bin/env python3
"""Measure how long KV cells take to the host's memory and back, against computing their tokens again.

usage: .venv/bin/python scripts/benchmarks/cell_moves.py MODEL.gguf [MODEL.gguf ...]
       [--tokens 128,512,2048] [--cache f16,q8_0] [--flash-attn on,off] [-t 2] [--rounds 5]

A text of each length is computed once in passes of 512 tokens, and then moved out and in as an
answer that gives up its cells. Its cells are once consecutive, and once alternate with those of
another text in stretches of STRETCH cells. Medians of the rounds, in microseconds a token.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels.gemm import choose_min_rows
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.request import RunOptions

PASS_TOKENS = 512
STRETCH = 8
TEXT, OTHER = 0, 1  # slots
TOKEN = 5


def main() -> None:
    """Parse the flags, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tokens", default="128,512,2048")
    parser.add_argument("--cache", default="f16")
    parser.add_argument("--flash-attn", default="on,off")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    lengths = [int(length) for length in args.tokens.split(",")]
    for path in args.models:
        with open_model(path) as model:
            print(path.name)
            for cache, flash_attn in product(args.cache.split(","), args.flash_attn.split(",")):
                if cache in ("f16", "f32", "bf16") or flash_attn == "on":
                    measure(model, cache, flash_attn, lengths, args)


def measure(
    model: Model, cache: str, flash_attn: str, lengths: list[int], args: argparse.Namespace
) -> None:
    """Print a line for each length and order of the cells."""
    options = ContextOptions(
        2 * max(lengths) + 64,
        PASS_TOKENS,
        PASS_TOKENS,
        2,
        args.threads,
        args.threads,
        cache,
        cache,
        flash_attn,
        gemm_min_rows=choose_min_rows(RunOptions().gemm, 2, False),
    )
    with open_context(model, options) as context:
        ledger = Ledger(context)
        for length in lengths:
            ledger.claim_slot()
            start_time = time.perf_counter()
            compute(context, ledger, TEXT, length, PASS_TOKENS)
            computing = (time.perf_counter() - start_time) / length
            consecutive = list(move(ledger, args.rounds))
            ledger.trim(TEXT, 0)
            ledger.claim_slot()
            for _ in range(-(-length // STRETCH)):
                for slot in (TEXT, OTHER):
                    compute(context, ledger, slot, STRETCH, STRETCH)
            # the first move reads the stretches; moved in, the cells are consecutive
            mixed = list(move(ledger, 1))
            for slot in (TEXT, OTHER):
                ledger.trim(slot, 0)
                ledger.release(slot)
            print(
                f"  {cache}, flash attention {flash_attn}, {length} tokens: "
                f"{mixed[0][2] / length / 1024:.1f} KiB a token; out "
                f"{microseconds(consecutive, 0, length)}, in {microseconds(consecutive, 1, length)}, "
                f"out of stretches {microseconds(mixed, 0, length)}, "
                f"computed again {computing * 1e6:.0f} µs a token",
                flush=True,
            )


def compute(context: Context, ledger: Ledger, slot: int, count: int, n_rows: int) -> None:
    """Add `count` tokens to a slot, in passes of at most `n_rows`."""
    while count:
        start, n_now = len(ledger.tokens[slot]), min(count, n_rows)
        positions = range(start, start + n_now)
        outputs = [position == positions[-1] for position in positions]
        context.decode(BatchRows([TOKEN] * n_now, positions, [slot] * n_now, outputs))
        ledger.append(slot, [TOKEN] * n_now)
        count -= n_now


def move(ledger: Ledger, rounds: int) -> Iterator[tuple[float, float, int]]:
    """Move the text out and in. Yield for each round the seconds of both, and the bytes."""
    for _ in range(rounds):
        start_time = time.perf_counter()
        swapped = ledger.swap_out(TEXT)
        middle_time = time.perf_counter()
        assert ledger.swap_in(TEXT, swapped)
        yield middle_time - start_time, time.perf_counter() - middle_time, len(swapped.state)


def microseconds(rounds: list[tuple[float, float, int]], column: int, length: int) -> str:
    """Return the median time of a token."""
    return f"{statistics.median(row[column] for row in rounds) / length * 1e6:.1f}"


if __name__ == "__main__":
    main()
