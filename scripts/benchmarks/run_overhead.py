#!/usr/bin/env python3
"""Measure the time that `llmcli run` adds to llama.cpp's forward passes, inside one process.

usage: .venv/bin/python scripts/benchmarks/run_overhead.py MODEL.gguf
       [--answers 10] [--tokens 256] [--stretch 16] [--threads N]

Two processes of the same program differ by several percent, so comparing processes cannot show a
difference of 1%. Here an answer (with sampler, detokenizer, log-probabilities and times, as in `run
--json`) and the bare passes of `bench` advance in turn over one loaded model. Each computes
--stretch tokens at the same positions, in alternating order, so that drift of the machine affects
both. The script prints the median ratio of speeds (run / bench) over all stretches with a 95%
bootstrap interval.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.bench.speed.random_passes import RandomPasses, run_passes
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from scripts.benchmarks.paired_runs import interval

PROMPT = "Once upon a time"


def seconds(work: Callable[[], object]) -> float:
    """Return the wall seconds of calling `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def answer(
    runner: Runner, passes: RandomPasses, tokens: int, stretch: int, turn: int
) -> list[float]:
    """Generate one answer of `tokens` tokens and the same number of bare passes in turn. Return the
    ratio of speeds, run / bench, of each stretch of `stretch` tokens.
    """
    prompt = runner.encode_text(PROMPT)
    greedy = default_sampling().with_values({"temp": 0})
    reply = runner.reply(
        Request(prompt, greedy, max_tokens=tokens + 1, ignore_eos=True, logprobs=True)
    )
    events = iter(reply)
    next(events)  # the first token's time belongs to the prompt
    run_passes(passes.prompt_passes(0, len(prompt)))
    ratios = []
    for start in range(0, tokens, stretch):
        ready = passes.token_passes(len(prompt) + start, stretch)
        sides = {
            "run": lambda: list(islice(events, stretch)),
            "bench": lambda steps=ready: run_passes(steps),
        }
        order = sorted(sides, reverse=bool((turn + start // stretch) % 2))
        spent = {name: seconds(sides[name]) for name in order}
        ratios.append(spent["bench"] / spent["run"])
    list(events)
    return ratios


def main() -> None:
    """Parse the flags, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--answers", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--stretch", type=int, default=16)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    threads = args.threads
    options = RunOptions(ctx_size=512, threads=threads)
    ratios: list[float] = []
    with (
        open_runner(args.model, options) as runner,
        open_context(
            runner.model, ContextOptions(512, n_threads=threads, n_threads_batch=threads)
        ) as context,
    ):
        passes = RandomPasses(context, runner.model)
        answer(runner, passes, args.stretch, args.stretch, 0)  # warm-up
        for turn in range(args.answers):
            context.clear()
            ratios += answer(runner, passes, args.tokens, args.stretch, turn)
    low, high = interval(ratios)
    print(
        f"run / bench, {threads} threads: median {statistics.median(ratios):.4f}  95% interval {low:.4f} to {high:.4f}"
        f"  ({len(ratios)} pairs of {args.stretch} tokens)"
    )


if __name__ == "__main__":
    main()
