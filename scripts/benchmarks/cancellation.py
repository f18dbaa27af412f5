#!/usr/bin/env python3
"""Measure how soon the engine of a server is free after a client has left.

usage: .venv/bin/python scripts/benchmarks/cancellation.py REF [--tokens 4096] [--rounds 5]
       [--leave 0.5] [-ub 512] [-t 1]

A client sends a prompt of --tokens random tokens and leaves --leave seconds after its first pass
has begun. The script prints the time until the engine's thread is free for others, and the time
that a micro-batch of this prompt takes.
"""

import argparse
import asyncio
import random
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.config import load_config
from llmcli.model_loader.open_server_model import open_server_model
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.sampling import default_sampling
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.ui import UI

GREEDY = default_sampling().with_values({"temp": 0})


async def time_to_free(bridge: EngineBridge, tokens: list[int], leave_after: float) -> float:
    """Send a prompt, leave, and return the seconds until the engine's thread is free."""
    pending = bridge.answer(Request(tuple(tokens), GREEDY, 8))
    await bridge.run_on_engine_thread(lambda: None)  # the prompt is submitted, and a pass begins
    await asyncio.sleep(leave_after)
    left_at = time.perf_counter()
    await pending.aclose()
    is_busy = await bridge.run_on_engine_thread(lambda: bridge.runner.engine.is_busy)
    assert not is_busy
    return time.perf_counter() - left_at


async def measure(bridge: EngineBridge, args: argparse.Namespace) -> None:
    """Measure all rounds and print them."""
    engine, rng = bridge.runner.engine, random.Random(0)
    ordinary_tokens = range(300, min(20_000, bridge.runner.model.n_vocab))
    seconds = []
    for _ in range(args.rounds):
        tokens = rng.choices(ordinary_tokens, k=args.tokens)
        seconds.append(await time_to_free(bridge, tokens, args.leave))
    await bridge.run_on_engine_thread(engine.check)
    # one micro-batch to its end
    tokens = rng.choices(ordinary_tokens, k=args.ubatch)
    start_time = time.perf_counter()
    pending = bridge.answer(Request(tuple(tokens), GREEDY, 1))
    async for _ in pending:
        pass
    whole = time.perf_counter() - start_time
    milliseconds = ", ".join(f"{1e3 * value:.0f}" for value in sorted(seconds))
    print(f"the engine was free after {milliseconds} ms; {args.ubatch} rows take {whole:.2f} s")


def main() -> None:
    """Open the model as `serve` does, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leave", type=float, default=0.5)
    parser.add_argument("-ub", "--ubatch", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=1)
    args = parser.parse_args()
    options = RunOptions(
        ctx_size=args.tokens + 1024,
        threads=args.threads,
        threads_batch=args.threads,
        ubatch_size=args.ubatch,
    )
    flags = RunFlags(options, {}, NO_SEARCH)
    opened = open_server_model(args.ref, flags, load_config(), UI(), on_other_thread=True)
    with opened as model, closing(EngineBridge(model.runner)) as bridge:
        asyncio.run(measure(bridge, args))


if __name__ == "__main__":
    main()
