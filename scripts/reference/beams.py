#!/usr/bin/env python3
"""Compare beam search with transformers' answers, and its memory and time with separate runs.

usage: .venv/bin/python scripts/reference/beams.py [--model MODEL.gguf] [--prompts 50] [--tokens 40]
       [--rounds 7] [--threads N]

1. Answers, on tests/data/stories260K in float32 (f32 KV, no flash attention, one thread on both
sides): the number of prompts with the same answers in the same order and with scores within 1e-4
(relative above 1), and the seconds of both searches.

2. Memory, on MODEL (default: stories260K): the largest number of KV cells in use with 4 beams, a
prompt of 1,000 tokens and 200 generated tokens, compared with four separate sequences.

3. Time, on MODEL: how many times faster one search of k beams is than k greedy runs of the same
length. The bound is k T(1) / T(k), where T(m) is the time of a bare llama.cpp pass of m rows at the
same depth. The runs and passes take turns, and the median over the rounds counts.
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

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
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


def compare_answers(context: Context, model: Model, prompts: int, tokens: int) -> None:
    """Run part 1: search with all settings of SEARCHES on all prompts. For every second prompt, a
    full stop also ends an answer.
    """
    oracle = beams.oracle(STORIES)
    stop = next(token for token in range(model.n_vocab) if model.piece(token) == b".")
    for search in SEARCHES:
        n_equal, our_seconds, their_seconds = 0, 0.0, 0.0
        for number, text in enumerate(beams.PROMPTS[:prompts]):
            prompt = model.tokenize(text, special=False, add_special=True)
            end_tokens = {2, stop} if number % 2 else {2}
            clock = [time.perf_counter()]
            ours = beams.ours(context, model, prompt, search, tokens, end_tokens)
            clock.append(time.perf_counter())
            expected = beams.theirs(oracle, prompt, search, tokens, end_tokens)
            clock.append(time.perf_counter())
            our_seconds, their_seconds = (
                our_seconds + clock[1] - clock[0],
                their_seconds + clock[2] - clock[1],
            )
            n_equal += beams.same(ours, expected)
            if not beams.same(ours, expected):
                print(f"  differs: {text!r}\n    ours   {ours[:2]}\n    theirs {expected[:2]}")
        print(
            f"k {search.beams} penalty {search.length_penalty:4} early {search.early_stopping:5}: "
            f"{n_equal}/{prompts} identical, {our_seconds:.2f} s, transformers {their_seconds:.2f} s ({their_seconds / our_seconds:.1f} times)",
            flush=True,
        )


def start_engine(context: Context, model: Model, request: Request) -> tuple[Engine, int]:
    """Empty the context, and return an engine that has read the request's prompt, with the id of
    its sequence.
    """
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


def make_prompt(model: Model, count: int) -> tuple[int, ...]:
    """Return a prompt of `count` tokens of real text."""
    return tuple(
        model.tokenize(". ".join(beams.PROMPTS * 4), special=False, add_special=True)[:count]
    )


def measure_cells(context: Context, model: Model) -> None:
    """Run part 2: print the largest number of cells in use."""
    search = BeamSettings(WIDTH)
    request = Request(
        make_prompt(model, LONG), GREEDY, max_tokens=GENERATED, strategy="beam", search=search
    )
    engine, _ = start_engine(context, model, request)
    peak = engine.ledger.used_cells
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
        peak = max(peak, engine.ledger.used_cells)
    separate = WIDTH * (LONG + GENERATED - 1)  # the last token is never computed
    fewer = f"at most {peak} cells, separate sequences {separate}: {1 - peak / separate:.1%} fewer"
    print(f"{WIDTH} beams, prompt {LONG}, {GENERATED} generated: {fewer}", flush=True)


def seconds_of_run(context: Context, model: Model, request: Request) -> float:
    """Run a request; return the seconds after its prompt."""
    engine, _ = start_engine(context, model, request)
    begun = time.perf_counter()
    while engine.is_busy:
        engine.step()
    return time.perf_counter() - begun


def seconds_of_passes(context: Context, prompt: tuple[int, ...], rows: int, count: int) -> float:
    """Return the seconds of `count` bare llama.cpp passes of `rows` rows. The rows are sequences
    that share the prompt's cells.
    """
    context.clear()
    depth = len(prompt)
    context.decode(BatchRows(prompt, range(depth), [0] * depth, [False] * (depth - 1) + [True]))
    for slot in range(1, rows):
        context.copy(0, slot, 0, depth)
    seconds = 0.0
    for position in range(depth, depth + count):
        forward = context.prepare(
            BatchRows(
                [prompt[position % depth]] * rows, [position] * rows, range(rows), [True] * rows
            )
        )
        begun = time.perf_counter()
        forward()
        seconds += time.perf_counter() - begun
    return seconds


def measure_times(context: Context, model: Model, rounds: int, tokens: int) -> None:
    """Run part 3: print the gain of beam search over separate runs, and the share of the bound."""
    prompt = make_prompt(model, 64)
    for k in (4, 8):
        gains, bounds = [], []
        greedy = Request(prompt, GREEDY, max_tokens=tokens)
        beam_search = Request(
            prompt, GREEDY, max_tokens=tokens, strategy="beam", search=BeamSettings(k)
        )
        for _ in range(rounds):
            greedy_seconds, single_row_seconds = (
                seconds_of_run(context, model, greedy),
                seconds_of_passes(context, prompt, 1, tokens - 1),
            )
            search_seconds, many_rows_seconds = (
                seconds_of_run(context, model, beam_search),
                seconds_of_passes(context, prompt, k, tokens - 1),
            )
            gains.append(k * greedy_seconds / search_seconds)
            bounds.append(k * single_row_seconds / many_rows_seconds)
        shares = [gain / bound for gain, bound in zip(gains, bounds, strict=True)]
        print(
            f"k {k}: {statistics.median(gains):.2f} times as fast as {k} runs, bound {statistics.median(bounds):.2f}, "
            f"share of the bound {statistics.median(shares):.3f} (from {min(shares):.3f} to {max(shares):.3f})",
            flush=True,
        )


def main() -> None:
    """Parse the flags, run the three parts and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        small = Path(temporary) / "stories.gguf"
        write.write_model(
            plan.plan_quantization(checkpoint_source.open_checkpoint(STORIES), "F32"),
            small,
            threads=1,
        )
        with ExitStack() as stack:
            model = stack.enter_context(open_model(small, ON_HOST))
            options = ContextOptions(512, n_seq_max=8, type_k="f32", type_v="f32", flash_attn="off")
            compare_answers(
                stack.enter_context(open_context(model, options)), model, args.prompts, args.tokens
            )
        with ExitStack() as stack:
            model = stack.enter_context(open_model(args.model or small, ON_HOST))
            threads = args.threads
            options = ContextOptions(2048, n_seq_max=8, n_threads=threads, n_threads_batch=threads)
            context = stack.enter_context(open_context(model, options))
            measure_cells(context, model)
            measure_times(context, model, args.rounds, 64)


if __name__ == "__main__":
    main()
