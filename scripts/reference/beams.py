#!/usr/bin/env python3
"""Compare beam search with transformers, its cells with separate sequences, its time with separate
runs.

usage: .venv/bin/python scripts/reference/beams.py [--model MODEL.gguf] [--prompts 50] [--tokens 40]
       [--rounds 7] [--threads N]

1. On tests/data/stories260K in float32 (f32 KV, no flash attention, one thread on both sides): the
number of prompts with the same answers in the same order and scores within 1e-4 (relative above 1),
and the seconds of both searches.

2. On MODEL (default: the same): the most cells in use with 4 beams, a prompt of 1,000 tokens and
200
generated ones, against four separate sequences.

3. On MODEL: one search of k beams against k greedy runs of the same length, and against the bound
k T(1) / T(k) of llama.cpp's passes of 1 and of k rows at the same depth. All advance in turn;
medians over the rounds.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.fixtures import beams
from tests.fixtures.fakes import FakeVocabulary

STORIES = Path(__file__).parents[2] / "tests" / "data" / "stories260K"
SEARCHES = [BeamSettings(k, penalty) for k in (2, 4, 8) for penalty in (0.0, 1.0, 2.0)] + [
    BeamSettings(4, 1.0, "yes"),
    BeamSettings(4, 1.0, "never"),
    BeamSettings(4, -1.0, "never"),
]
GREEDY = default_sampling().with_values({"temp": 0})
LONG, GENERATED, WIDTH = 1000, 200, 4


def identical(context: Context, model: Model, prompts: int, tokens: int) -> None:
    """Run part 1: every search over the prompts; every second prompt may end at a full stop."""
    oracle = beams.oracle(STORIES)
    stop = next(token for token in range(model.n_vocab) if model.piece(token) == b".")
    for search in SEARCHES:
        good, mine, yours = 0, 0.0, 0.0
        for number, text in enumerate(beams.PROMPTS[:prompts]):
            prompt = model.tokenize(text, special=False, add_special=True)
            ends = {2, stop} if number % 2 else {2}
            times = [time.perf_counter()]
            found = beams.ours(context, model, prompt, search, tokens, ends)
            times.append(time.perf_counter())
            expected = beams.theirs(oracle, prompt, search, tokens, ends)
            times.append(time.perf_counter())
            mine, yours = mine + times[1] - times[0], yours + times[2] - times[1]
            good += beams.same(found, expected)
            if not beams.same(found, expected):
                print(f"  differs: {text!r}\n    ours   {found[:2]}\n    theirs {expected[:2]}")
        print(
            f"k {search.beams} penalty {search.length_penalty:4} early {search.early_stopping:5}: "
            f"{good}/{prompts} identical, {mine:.2f} s, transformers {yours:.2f} s ({yours / mine:.1f} times)",
            flush=True,
        )


def started(context: Context, model: Model, request: Request) -> tuple[Engine, int]:
    """Return an engine over an emptied context that has read the prompt."""
    context.clear()
    engine = Engine(
        context,
        FakeVocabulary(model.piece, lambda token: False, model.n_vocab),
        NativeChains(model.n_vocab),
    )
    number = engine.submit(request)
    while not engine.ledger.tokens[0] or len(engine.ledger.tokens[0]) < len(request.tokens):
        engine.step()
    return engine, number


def some_text(model: Model, count: int) -> tuple[int, ...]:
    """Return a prompt of `count` tokens."""
    return tuple(
        model.tokenize(". ".join(beams.PROMPTS * 4), special=False, add_special=True)[:count]
    )


def cells(context: Context, model: Model) -> None:
    """Run part 2."""
    search = BeamSettings(WIDTH)
    request = Request(
        some_text(model, LONG), GREEDY, max_tokens=GENERATED, strategy="beam", search=search
    )
    engine, _ = started(context, model, request)
    most = engine.ledger.used_cells
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
        most = max(most, engine.ledger.used_cells)
    apart = WIDTH * (LONG + GENERATED - 1)  # the last token is never computed
    fewer = f"at most {most} cells, separate sequences {apart}: {1 - most / apart:.1%} fewer"
    print(f"{WIDTH} beams, prompt {LONG}, {GENERATED} generated: {fewer}", flush=True)


def seconds_of_run(context: Context, model: Model, request: Request) -> float:
    """Return the seconds from the first to the last token."""
    engine, _ = started(context, model, request)
    begun = time.perf_counter()
    while engine.is_busy:
        engine.step()
    return time.perf_counter() - begun


def seconds_of_passes(context: Context, prompt: tuple[int, ...], rows: int, count: int) -> float:
    """Return the seconds of `count` passes of `rows` rows after a shared prompt, with llama.cpp
    alone.
    """
    context.clear()
    depth = len(prompt)
    context.decode(BatchRows(prompt, range(depth), [0] * depth, [False] * (depth - 1) + [True]))
    for slot in range(1, rows):
        context.copy(0, slot, 0, depth)
    spent = 0.0
    for at in range(depth, depth + count):
        forward = context.prepare(
            BatchRows([prompt[at % depth]] * rows, [at] * rows, range(rows), [True] * rows)
        )
        begun = time.perf_counter()
        forward()
        spent += time.perf_counter() - begun
    return spent


def times(context: Context, model: Model, rounds: int, tokens: int) -> None:
    """Run part 3."""
    prompt = some_text(model, 64)
    for k in (4, 8):
        gains, bounds = [], []
        one = Request(prompt, GREEDY, max_tokens=tokens)
        many = Request(prompt, GREEDY, max_tokens=tokens, strategy="beam", search=BeamSettings(k))
        for _ in range(rounds):
            single, alone = (
                seconds_of_run(context, model, one),
                seconds_of_passes(context, prompt, 1, tokens - 1),
            )
            search, wide = (
                seconds_of_run(context, model, many),
                seconds_of_passes(context, prompt, k, tokens - 1),
            )
            gains.append(k * single / search)
            bounds.append(k * alone / wide)
        shares = [gain / bound for gain, bound in zip(gains, bounds, strict=True)]
        print(
            f"k {k}: {statistics.median(gains):.2f} times as fast as {k} runs, bound {statistics.median(bounds):.2f}, "
            f"share of the bound {statistics.median(shares):.3f} (from {min(shares):.3f} to {max(shares):.3f})",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        small = Path(place) / "stories.gguf"
        write.write_model(
            plan.plan_quantization(checkpoint_source.open_checkpoint(STORIES), "F32"),
            small,
            threads=1,
        )
        with ExitStack() as opened:
            model = opened.enter_context(open_model(small, gpu_layers=0))
            kind = ContextOptions(512, n_seq_max=8, type_k="f32", type_v="f32", flash_attn="off")
            identical(
                opened.enter_context(open_context(model, kind)), model, asked.prompts, asked.tokens
            )
        with ExitStack() as opened:
            model = opened.enter_context(open_model(asked.model or small, gpu_layers=0))
            threads = asked.threads
            kind = ContextOptions(2048, n_seq_max=8, n_threads=threads, n_threads_batch=threads)
            context = opened.enter_context(open_context(model, kind))
            cells(context, model)
            times(context, model, asked.rounds, 64)


if __name__ == "__main__":
    main()
