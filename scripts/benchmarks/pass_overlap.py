#!/usr/bin/env python3
"""Measure what passes gain that begin before the texts of the last tokens are handled.

usage: .venv/bin/python scripts/benchmarks/pass_overlap.py MODEL.gguf [MODEL.gguf ...]
       [--answers 1,4,8] [--threads 1,2] [--tokens 96] [--rounds 7]

Each line gives tokens per second of so many answers at once, without and with overlap
(engine/pass_ahead.py): medians of alternating rounds, and the median and range of their ratios. The
answers must be equal. On a CPU both share the processors, so the ratios are near 1.
"""

import argparse
import statistics
import time
from pathlib import Path

from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling

CONTEXT = 4096


def main() -> None:
    """Print a line for each model, number of answers and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--answers", type=numbers, default=[1, 4, 8])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"{'model':40} {'answers':>7} {'threads':>7} {'without':>8} {'with':>8}  ratio")
    for model in args.models:
        for threads in args.threads:
            for answers in args.answers:
                measure(model, answers, threads, args.tokens, args.rounds)


def numbers(text: str) -> list[int]:
    """Read numbers that are separated by commas."""
    return [int(word) for word in text.split(",")]


def measure(model: Path, answers: int, threads: int, tokens: int, rounds: int) -> None:
    """Print the speeds of one model."""
    options = RunOptions(threads=threads, threads_batch=threads, ctx_size=CONTEXT)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with open_runner(model, options, slots=answers) as runner:
        generate(runner, answers, 8)
        for _ in range(rounds):
            texts = []
            for overlaps in (False, True):
                runner.engine.overlaps_passes = overlaps
                speed, ids = generate(runner, answers, tokens)
                speeds[overlaps].append(speed)
                texts.append(ids)
            assert texts[0] == texts[1], "overlap changes the answers"
    ratios = [with_ / without for without, with_ in zip(*speeds.values(), strict=True)]
    print(
        f"{model.name:40} {answers:7} {threads:7} {statistics.median(speeds[False]):8.1f} "
        f"{statistics.median(speeds[True]):8.1f}  {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def generate(runner: Runner, answers: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Generate answers at once. Return the tokens per second after the first pass that gave any,
    and the ids of all tokens.
    """
    engine = runner.engine
    prompts = [(1, 5 + number, 6, 7) for number in range(answers)]
    sampling = default_sampling().with_values({"seed": 1})
    ids = [engine.submit(Request(prompt, sampling, tokens, ignore_eos=True)) for prompt in prompts]
    count, first_count, begun = 0, 0, 0.0
    while engine.is_busy:
        count += sum(event.token is not None for event in engine.step())
        if count and not first_count:
            first_count, begun = count, time.perf_counter()
    seconds = time.perf_counter() - begun
    found = [[token.id for token in engine.pop_answer(number).tokens] for number in ids]
    return (count - first_count) / seconds, found


if __name__ == "__main__":
    main()
