#!/usr/bin/env python3
"""Measure what a token costs beyond llama.cpp's llama_decode, and which parts take that time.

usage: .venv/bin/python scripts/benchmarks/token_overhead.py MODEL.gguf [MODEL.gguf ...]
       [--answers 4] [--tokens 128] [--threads N] [--chain greedy,default] [--numpy]

One sequence is answered as by `run` and `chat`, with the display (text goes to /dev/null). The cost
is the time between two tokens without the time inside llama_decode. Its median and mean are
measured with only that call timed; the parts are measured in separate answers, because reading a
clock costs time, too. Chains are greedy and llama.cpp's default (top-k, top-p, min-p, temperature
0.8), each with and without log-probabilities. Forward passes empty the CPU caches, so a part costs
several times what it costs in a loop of its own.
"""

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path

from llmcli.bench.function_timers import FunctionTimers, TimedFunction
from llmcli.bench.phases import ignore_end_tokens
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.runtime.binding.batch import Batch
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.sampler import GreedyNative, NativeChain
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.runtime.sampling.chain import GreedyChain, NumpyChain
from llmcli.runtime.text.detokenizer import Detokenizer

PROMPT = "Once upon a time"
DECODE = "llama_decode"
PARTS: tuple[TimedFunction, ...] = (
    ("plan", Engine, Engine._single_token_pass.__name__),
    ("checks", Context, Context._check.__name__),
    ("batch fill", Batch, Batch.fill.__name__),
    ("row look-up", Context, Context.logits_row.__name__),
    ("log-sum", LogSumExp, LogSumExp.__call__.__name__),
    ("log-sum", LogSumExp, LogSumExp.with_maxima.__name__),
    ("draw", NativeChain, NativeChain.draw.__name__),
    ("draw", GreedyNative, GreedyNative.draw.__name__),
    ("draw", GreedyChain, GreedyChain.draw.__name__),
    ("draw", NumpyChain, NumpyChain.draw.__name__),
    ("detokenize", Detokenizer, Detokenizer.feed.__name__),
    ("times", Sequence, Sequence.record_token.__name__),
    ("screen", StreamWriter, StreamWriter.write_event.__name__),
)


def answer(
    runner: Runner, sampling: Sampling, tokens: int, logprobs: bool, probe: FunctionTimers
) -> list[dict[str, float]]:
    """Return for each token after the first its gap and the seconds of each part."""
    runner.engine.ledger.evict_idle()
    request = Request(
        runner.encode_text(PROMPT), sampling, tokens + 1, allow_repetition=True, logprobs=logprobs
    )
    found: list[dict[str, float]] = []
    stream = StreamWriter()
    with Path(os.devnull).open("w", encoding="utf-8") as sink, contextlib.redirect_stdout(sink):
        last = 0.0
        for event in runner.reply(request):
            stream.write_event(event)
            now = time.perf_counter()
            spent = probe.reset()
            if last and event.token:
                found.append({"gap": now - last, **spent})
            last = time.perf_counter()
    return found


def ours(row: dict[str, float]) -> float:
    """Return the microseconds of a gap outside llama_decode."""
    return (row["gap"] - row[DECODE]) * 1e6


def measure(runner: Runner, sampling: Sampling, logprobs: bool, asked: argparse.Namespace) -> None:
    """Print a line for the total and one for the parts."""
    call = (DECODE, lib(), "llama_decode")
    whole: list[dict[str, float]] = []
    parts: list[dict[str, float]] = []
    for number in range(asked.answers + 1):
        for rows, places in ((whole, [call]), (parts, [call, *PARTS])):
            probe = FunctionTimers()
            with probe.install(places):
                found = answer(runner, sampling, asked.tokens, logprobs, probe)
            if number:  # the first answer is a warm-up
                rows += found
    cost = [ours(row) for row in whole]
    gap = statistics.median(row["gap"] for row in whole) * 1e3
    name = "greedy " if sampling.is_greedy else "default"
    tenths = statistics.quantiles(cost, n=10)
    print(
        f"  {name} {'with' if logprobs else 'no  '} logprobs: {statistics.median(cost):6.0f} µs per token, mean "
        f"{statistics.fmean(cost):.0f}, p10 {tenths[0]:.0f}, p90 {tenths[-1]:.0f}  (of {gap:.2f} ms)",
        flush=True,
    )
    told = {
        part: statistics.median(row.get(part, 0.0) * 1e6 for row in parts) for part, _, _ in PARTS
    }
    told["the rest"] = statistics.median(map(ours, parts)) - sum(told.values())
    print("    " + " · ".join(f"{part} {spent:.0f}" for part, spent in told.items()), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chain", default="greedy,default")
    parser.add_argument(
        "--numpy", action="store_true", help="use the numpy chain instead of llama.cpp's samplers"
    )
    asked = parser.parse_args()
    options = RunOptions(ctx_size=512, threads=asked.threads)
    chains = {
        "greedy": default_sampling().with_values({"temp": 0}),
        "default": default_sampling().with_values({"seed": 1}),
    }
    for path in asked.models:
        with (
            open_runner(path, options, native_sampling=not asked.numpy) as runner,
            ignore_end_tokens(runner),
        ):
            print(
                f"{path.name}, vocabulary {runner.model.n_vocab:,}, {asked.threads} threads",
                flush=True,
            )
            for name in asked.chain.split(","):
                for logprobs in (False, True):
                    measure(runner, chains[name], logprobs, asked)


if __name__ == "__main__":
    main()
