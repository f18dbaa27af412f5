#!/usr/bin/env python3
"""Measure the time of a token outside llama.cpp's llama_decode, in total and by part.

usage: .venv/bin/python scripts/benchmarks/token_overhead.py MODEL.gguf [MODEL.gguf ...]
       [--answers 4] [--tokens 128] [--threads N] [--chain greedy,default] [--numpy]

The engine answers one prompt at a time as in `run` and `chat`, including the display, whose text
goes to /dev/null. The overhead is the time between two tokens minus the time inside llama_decode.
Its total is measured with only that call timed. The parts (sampling, detokenizing and others) are
measured in separate answers, because reading the clock for every part adds time. The sampler
chains are greedy and llama.cpp's default (top-k, top-p, min-p, temperature 0.8), each with and
without log-probabilities. Forward passes evict the CPU caches, so a part takes several times longer
here than when it is called alone in a loop.
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
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.rows.batch import Batch
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
    """Generate one answer. Return for each token after the first a row of seconds: "gap", the time
    since the previous token, and the time in each function that `probe` times.
    """
    runner.engine.ledger.evict_idle()
    request = Request(
        runner.encode_text(PROMPT), sampling, tokens + 1, allow_repetition=True, logprobs=logprobs
    )
    rows: list[dict[str, float]] = []
    stream = StreamWriter()
    with Path(os.devnull).open("w", encoding="utf-8") as sink, contextlib.redirect_stdout(sink):
        previous = 0.0
        for event in runner.reply(request):
            stream.write_event(event)
            now = time.perf_counter()
            seconds_by_part = probe.reset()
            if previous and event.token:
                rows.append({"gap": now - previous, **seconds_by_part})
            previous = time.perf_counter()
    return rows


def overhead_us(row: dict[str, float]) -> float:
    """Return the microseconds of a row's gap that are outside llama_decode."""
    return (row["gap"] - row[DECODE]) * 1e6


def measure(runner: Runner, sampling: Sampling, logprobs: bool, args: argparse.Namespace) -> None:
    """Measure one sampler chain; print a line with the total overhead and a line with its parts."""
    call = (DECODE, lib(), "llama_decode")
    totals: list[dict[str, float]] = []
    parts: list[dict[str, float]] = []
    for number in range(args.answers + 1):
        for rows, functions in ((totals, [call]), (parts, [call, *PARTS])):
            probe = FunctionTimers()
            with probe.install(functions):
                answer_rows = answer(runner, sampling, args.tokens, logprobs, probe)
            if number:  # the first answer is a warm-up
                rows += answer_rows
    cost = [overhead_us(row) for row in totals]
    gap = statistics.median(row["gap"] for row in totals) * 1e3
    name = "greedy " if sampling.is_greedy else "default"
    tenths = statistics.quantiles(cost, n=10)
    print(
        f"  {name} {'with' if logprobs else 'no  '} logprobs: {statistics.median(cost):6.0f} µs per token, mean "
        f"{statistics.fmean(cost):.0f}, p10 {tenths[0]:.0f}, p90 {tenths[-1]:.0f}  (of {gap:.2f} ms)",
        flush=True,
    )
    microseconds = {
        part: statistics.median(row.get(part, 0.0) * 1e6 for row in parts) for part, _, _ in PARTS
    }
    microseconds["the rest"] = statistics.median(map(overhead_us, parts)) - sum(
        microseconds.values()
    )
    print(
        "    " + " · ".join(f"{part} {spent:.0f}" for part, spent in microseconds.items()),
        flush=True,
    )


def main() -> None:
    """Parse the flags, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chain", default="greedy,default")
    parser.add_argument(
        "--numpy", action="store_true", help="use the numpy chain instead of llama.cpp's samplers"
    )
    args = parser.parse_args()
    options = RunOptions(ctx_size=512, threads=args.threads)
    chains = {
        "greedy": default_sampling().with_values({"temp": 0}),
        "default": default_sampling().with_values({"seed": 1}),
    }
    for path in args.models:
        with (
            open_runner(path, options, native_sampling=not args.numpy) as runner,
            ignore_end_tokens(runner),
        ):
            print(
                f"{path.name}, vocabulary {runner.model.n_vocab:,}, {args.threads} threads",
                flush=True,
            )
            for name in args.chain.split(","):
                for logprobs in (False, True):
                    measure(runner, chains[name], logprobs, args)


if __name__ == "__main__":
    main()
