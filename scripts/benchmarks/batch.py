"""Measure the engine's tokens per second with several answers at once, and the time of a step
outside llama.cpp.

usage: .venv/bin/python scripts/benchmarks/batch.py MODEL.gguf [--counts 1,2,4,8,16] [--tokens 96]
       [--prompt 64] [--rounds 3] [--threads 2] [--kv f16] [--shared] [--profile]

In each round, every count of --counts sends that many requests to the engine at the same time,
without HTTP. The script prints the best round of each count, and all its rounds in parentheses.
`ours` is the time of a step outside llama.cpp. `raw` is the upper bound: batches of the same size
through the llama.cpp context alone, without sampling, scheduler or ledger.
"""

import argparse
import cProfile
import json
import pstats
import random
import time
from pathlib import Path

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling


def random_requests(
    runner: Runner, count: int, args: argparse.Namespace, rng: random.Random
) -> list[Request]:
    """Return `count` requests with random prompts. With --shared, the prompts differ only in their
    last four tokens.
    """
    ordinary_tokens = range(300, min(20_000, runner.model.n_vocab))
    stem = rng.choices(ordinary_tokens, k=args.prompt)
    requests = []
    for seed in range(count):
        tokens = (
            [*stem[:-4], *rng.choices(ordinary_tokens, k=4)]
            if args.shared
            else rng.choices(ordinary_tokens, k=args.prompt)
        )
        sampling = default_sampling().with_values({"seed": seed, **json.loads(args.sampling)})
        requests.append(
            Request(tuple(tokens), sampling, args.tokens, ignore_eos=True, client=str(seed))
        )
    return requests


def through_engine(runner: Runner, requests: list[Request]) -> tuple[float, float, float, int]:
    """Run the requests through the engine to their ends.

    Returns the seconds of the whole run, and three figures of the steps in which every request got
    a token: their seconds, their seconds inside llama.cpp, and their number.
    """
    engine, llama_seconds = runner.engine, 0.0
    decode = runner.context.decode

    def timed_decode(rows: BatchRows) -> object:
        nonlocal llama_seconds
        began = time.perf_counter()
        outputs = decode(rows)
        llama_seconds += time.perf_counter() - began
        return outputs

    runner.context.decode = timed_decode  # type: ignore[method-assign,assignment]
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    steps = [(0.0, 0.0, 0)]
    while engine.is_busy:
        start, before = time.perf_counter(), llama_seconds
        events = engine.step()
        steps.append((time.perf_counter() - start, llama_seconds - before, len(events)))
    total = time.perf_counter() - began
    del runner.context.decode  # type: ignore[method-assign]
    full = [step for step in steps if step[2] == len(requests)]
    engine.ledger.evict_idle()
    return total, sum(step[0] for step in full), sum(step[1] for step in full), len(full)


def raw_speed(context: Context, requests: list[Request], tokens: int) -> float:
    """Return the tokens per second of passes through the context alone, with one row for each
    request. The prompts are computed first and not timed.
    """
    context.clear()
    for slot, request in enumerate(requests):
        ids = list(request.tokens)
        context.decode(BatchRows(ids, range(len(ids)), [slot] * len(ids), [False] * len(ids)))
    count, position = len(requests), len(requests[0].tokens)
    begun = time.perf_counter()
    for step in range(tokens - 1):
        context.decode(
            BatchRows([300 + step] * count, [position + step] * count, range(count), [True] * count)
        )
    seconds = time.perf_counter() - begun
    context.clear()
    return count * (tokens - 1) / seconds


def main() -> None:
    """Parse the flags, measure every count in every round, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--counts", default="1,2,4,8,16")
    parser.add_argument("--sampling", default="{}")
    for name, value in (("tokens", 96), ("prompt", 64), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--gap", type=float)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    counts = [int(count) for count in args.counts.split(",")]
    cells = max(counts) * (args.prompt + args.tokens + 16) + 256
    options = RunOptions(
        ctx_size=cells, threads=args.threads, cache_type_k=args.kv, cache_type_v=args.kv
    )
    rng = random.Random(0)
    with open_runner(args.model, options, slots=max(counts)) as runner:
        runner.engine.schedule = Schedule(max_gap_seconds=args.gap)
        measured: dict[int, list[tuple[float, float, float, float]]] = {
            count: [] for count in counts
        }
        profile = cProfile.Profile()
        for _ in range(args.rounds):
            for count in counts:
                requests = random_requests(runner, count, args, rng)
                ceiling = raw_speed(runner.context, requests, args.tokens)
                if args.profile:
                    profile.enable()
                total, decode_seconds, llama_seconds, steps = through_engine(runner, requests)
                profile.disable()
                decoding = count * steps / decode_seconds
                measured[count].append(
                    (
                        count * args.tokens / total,
                        decoding,
                        ceiling,
                        (decode_seconds - llama_seconds) / steps * 1e3,
                    )
                )
        for count in counts:
            best = max(measured[count])
            rounds = " ".join(f"{row[0]:.1f}" for row in measured[count])
            print(
                f"{count:3d} at once: {best[0]:6.1f} tok/s with the prompts, {best[1]:6.1f} after them, "
                f"raw {best[2]:6.1f}; ours {best[3]:.2f} ms a step   ({rounds})"
            )
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
