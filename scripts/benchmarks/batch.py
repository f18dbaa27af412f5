"""Measure the engine's tokens per second with several answers at once, and where a step's time
goes.

usage: .venv/bin/python scripts/benchmarks/batch.py MODEL.gguf [--counts 1,2,4,8,16] [--tokens 96]
       [--prompt 64] [--rounds 3] [--threads 2] [--kv f16] [--shared] [--profile]

Each round sends `count` requests at once through the engine, without HTTP; the counts run in turn.
The best round of each count is printed, with all rounds in parentheses. `decode` is the time inside
llama.cpp, `ours` everything else in a step. `raw` is the upper bound: the same rows through the
context alone, without sampling, scheduler or ledger.
"""

import argparse
import cProfile
import json
import pstats
import random
import time
from pathlib import Path

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling


def asked(
    runner: Runner, count: int, given: argparse.Namespace, rng: random.Random
) -> list[Request]:
    """Return requests with random prompts; with --shared only the last four tokens differ."""
    words = range(300, min(20_000, runner.model.n_vocab))
    stem = rng.choices(words, k=given.prompt)
    made = []
    for seed in range(count):
        tokens = (
            [*stem[:-4], *rng.choices(words, k=4)]
            if given.shared
            else rng.choices(words, k=given.prompt)
        )
        sampling = default_sampling().with_values({"seed": seed, **json.loads(given.sampling)})
        made.append(
            Request(tuple(tokens), sampling, given.tokens, ignore_eos=True, client=str(seed))
        )
    return made


def through_engine(runner: Runner, requests: list[Request]) -> tuple[float, float, float, int]:
    """Return the seconds of all passes, of those after the last prompt, of those inside llama.cpp,
    and their number.
    """
    engine, inside = runner.engine, 0.0
    decode = runner.context.decode

    def timed(rows: BatchRows) -> object:
        nonlocal inside
        begun = time.perf_counter()
        found = decode(rows)
        inside += time.perf_counter() - begun
        return found

    runner.context.decode = timed  # type: ignore[method-assign,assignment]
    begun = time.perf_counter()
    for request in requests:
        engine.submit(request)
    steps = [(0.0, 0.0, 0)]
    while engine.is_busy:
        start, before = time.perf_counter(), inside
        events = engine.step()
        steps.append((time.perf_counter() - start, inside - before, len(events)))
    total = time.perf_counter() - begun
    del runner.context.decode  # type: ignore[method-assign]
    full = [step for step in steps if step[2] == len(requests)]
    engine.ledger.evict_idle()
    return total, sum(step[0] for step in full), sum(step[1] for step in full), len(full)


def raw(context: Context, requests: list[Request], tokens: int) -> float:
    """Return the tokens per second of the rows alone, without prompts."""
    context.clear()
    for slot, request in enumerate(requests):
        ids = list(request.tokens)
        context.decode(BatchRows(ids, range(len(ids)), [slot] * len(ids), [False] * len(ids)))
    count, place = len(requests), len(requests[0].tokens)
    begun = time.perf_counter()
    for step in range(tokens - 1):
        context.decode(
            BatchRows([300 + step] * count, [place + step] * count, range(count), [True] * count)
        )
    spent = time.perf_counter() - begun
    context.clear()
    return count * (tokens - 1) / spent


def main() -> None:
    """Measure the counts in turn."""
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
    given = parser.parse_args()
    counts = [int(count) for count in given.counts.split(",")]
    cells = max(counts) * (given.prompt + given.tokens + 16) + 256
    options = RunOptions(
        ctx_size=cells, threads=given.threads, cache_type_k=given.kv, cache_type_v=given.kv
    )
    rng = random.Random(0)
    with open_runner(given.model, options, slots=max(counts)) as runner:
        runner.engine.schedule = Schedule(max_gap_seconds=given.gap)
        found: dict[int, list[tuple[float, float, float, float]]] = {count: [] for count in counts}
        profile = cProfile.Profile()
        for _ in range(given.rounds):
            for count in counts:
                requests = asked(runner, count, given, rng)
                ceiling = raw(runner.context, requests, given.tokens)
                if given.profile:
                    profile.enable()
                total, full, inside, steps = through_engine(runner, requests)
                profile.disable()
                decoding = count * steps / full
                found[count].append(
                    (count * given.tokens / total, decoding, ceiling, (full - inside) / steps * 1e3)
                )
        for count in counts:
            best = max(found[count])
            rest = " ".join(f"{row[0]:.1f}" for row in found[count])
            print(
                f"{count:3d} at once: {best[0]:6.1f} tok/s with the prompts, {best[1]:6.1f} after them, "
                f"raw {best[2]:6.1f}; ours {best[3]:.2f} ms a step   ({rest})"
            )
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
