#!/usr/bin/env python3
"""Measure a step of the engine outside the forward pass: draws, bookkeeping, text and scheduling.

usage: .venv/bin/python scripts/benchmarks/draw_rows.py [--rows 64] [--vocabulary 151936]
       [--steps 40] [--threads 2] [--only NAME,...] [--model MODEL.gguf] [--profile NAME]

Without --model, a context without llama.cpp gives logits distributed as in real models, which are
written to memory anew for each pass. Three engines run in turn, step by step: one draws row by row,
and two draw from all rows at once, on one thread and on --threads. Their answers must be equal.
Each line gives the milliseconds of a step outside the pass: the median, the 10th and the 90th
percentile of the wall time, and the median CPU time of the engine's thread.

--model runs the same requests in a real model, whose llama_decode is left out of the times.
--profile prints where Python spends the time of one case.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.binding.rows.logits_row import LogitsRow
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, FakeVocabulary

PROMPT_TOKENS = 20
DISTINCT_ROWS = 8


@dataclass(frozen=True)
class Case:
    """Requests to measure: their sampling settings, and fields of Request. Every `every`-th row has
    the settings, the others the defaults.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    every: int = 1


CASES = {
    "default": Case(),
    "greedy": Case({"temp": 0}),
    "log-probabilities": Case({}, {"logprobs": True}),
    "ignore-eos": Case({}, {"ignore_eos": True}),
    "bias": Case({"logit_bias": "15+2 7-1 9-inf"}),
    "penalties": Case({"repeat_penalty": 1.1, "presence_penalty": 0.2}),
    "greedy-penalties": Case({"temp": 0, "repeat_penalty": 1.1}),
    "dry": Case({"dry_multiplier": 0.8}),
    "top-p-only": Case({"top_k": 0}),
    "one-in-8-penalties": Case({"repeat_penalty": 1.1}, every=8),
}


class StandInContext(FakeContext):
    """A context whose passes copy prepared logits to where a real pass would write them."""

    n_vocab = 0

    def prepare(self, source: np.ndarray, rows: int) -> None:
        """Set the logits. Shapes: source `[distinct rows, n_vocab]`."""
        self.n_vocab = source.shape[1]
        self.log_sum_exp = LogSumExp()
        self.source, self.buffer = source, np.empty((rows, self.n_vocab), np.float32)
        address, row_bytes = self.buffer.ctypes.data, 4 * self.n_vocab
        self.rows = [LogitsRow(self, address + row_bytes * number) for number in range(rows)]
        self.seconds = 0.0  # of the last pass
        self.cpu_seconds = 0.0
        self.turn = 0

    def decode(self, rows: BatchRows) -> Any:
        """Record the tokens of the batch, and copy logits for its rows."""
        start, cpu_start = time.perf_counter(), time.thread_time()
        self.turn += 1
        wanted = sum(rows.wants_logits)
        for number in range(wanted):
            self.buffer[number] = self.source[(number + self.turn) % len(self.source)]
        for token, sequence in zip(rows.tokens, rows.sequences, strict=True):
            self.set_token(sequence, token)
        self.seconds = time.perf_counter() - start
        self.cpu_seconds = time.thread_time() - cpu_start
        return self.rows[:wanted]


class StandInChains(NativeChains):
    """Chains that work without a real context."""

    def chain(self, steps: Any, seed: int) -> Any:
        made: Any = super().chain(steps, seed)

        def draw_from_all(row: Any) -> int:
            """Do the work of llama_sampler_sample, which needs a real context."""
            token: int = made._candidates.sample(made._address, row.logits)
            lib().llama_sampler_accept(made.pointer, token)
            return token

        made._draw_from_all = draw_from_all
        return made


class SerialChains(StandInChains):
    """Chains that draw row by row without row_draws.c."""

    def can_plan(self, chain: Any) -> bool:
        return False

    def chain(self, steps: Any, seed: int) -> Any:
        made = super().chain(steps, seed)
        made._can_plan = False
        return made

    def greedy(self, steps: Any) -> Any:
        return None if steps else super().greedy(steps)


def make_logits(vocabulary: int) -> np.ndarray:
    """Return rows of logits as of a language model: few likely tokens and a long tail."""
    generator = np.random.default_rng(1)
    order = generator.permuted(np.tile(np.arange(vocabulary), (DISTINCT_ROWS, 1)), axis=1)
    noise = generator.normal(0, 0.5, order.shape)
    return (18 - 1.5 * np.log1p(order) + noise).astype(np.float32)


def requests(case: Case, rows: int, n_vocab: int, tokens: int) -> list[Request]:
    """Return the requests of a case, each with its own seed and prompt."""
    made = []
    for number in range(rows):
        settings = case.settings if number % case.every == 0 else {}
        sampling = default_sampling().with_values({"seed": number, **settings})
        prompt = tuple((number * 37 + at * 11) % (n_vocab // 2) for at in range(PROMPT_TOKENS))
        made.append(Request(prompt, sampling, tokens, allow_repetition=True, **case.fields))
    return made


def make_engine(source: np.ndarray, rows: int, native: NativeChains) -> Engine:
    """Return an engine over a StandInContext."""
    context = StandInContext(n_ctx=1 << 16, n_seq_max=rows, n_batch=2048, n_outputs=rows)
    context.prepare(source, rows)
    vocabulary = FakeVocabulary(lambda token: b" word", lambda token: token == 2, source.shape[1])
    return Engine(context, vocabulary, native, schedule=Schedule())  # type: ignore[arg-type]


@dataclass
class Times:
    """Milliseconds of each step outside the pass."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        tenths = statistics.quantiles(self.wall, n=10)
        return (
            f"{statistics.median(self.wall):7.2f} ms (p10 {tenths[0]:.2f}, p90 {tenths[-1]:.2f}), "
            f"CPU {statistics.median(self.cpu):.2f} ms"
        )


def take_step(engine: Engine, times: Times, rows: int) -> list[int]:
    """Take one step, and add its times if each row got a token. Return the tokens."""
    start, cpu_start = time.perf_counter(), time.thread_time()
    events = engine.step()
    wall, cpu = time.perf_counter() - start, time.thread_time() - cpu_start
    context: Any = engine.context
    if len(events) == rows:
        times.wall.append((wall - context.seconds) * 1e3)
        times.cpu.append((cpu - context.cpu_seconds) * 1e3)
    return [event.token.id for event in events if event.token]


def measure(name: str, args: argparse.Namespace, source: np.ndarray) -> None:
    """Measure one case, and print a line for each way to draw."""
    n_vocab = source.shape[1]
    ways: dict[str, Callable[[], NativeChains]] = {
        "row by row": lambda: SerialChains(n_vocab),
        "together, 1 thread": lambda: StandInChains(n_vocab, threads=1),
        f"together, {args.threads} threads": lambda: StandInChains(n_vocab, threads=args.threads),
    }
    engines = {way: make_engine(source, args.rows, make()) for way, make in ways.items()}
    times = {way: Times() for way in ways}
    for engine in engines.values():
        for request in requests(CASES[name], args.rows, n_vocab, args.steps + 8):
            engine.submit(request)
    for _ in range(args.steps):
        tokens = [take_step(engine, times[way], args.rows) for way, engine in engines.items()]
        assert tokens[0] == tokens[1] == tokens[2], f"{name}: other tokens"
    print(f"{name}: {len(times['row by row'].wall)} steps, the same tokens")
    for way, spent in times.items():
        print(f"  {way:20} {spent}", flush=True)


def profile(name: str, args: argparse.Namespace, source: np.ndarray) -> None:
    """Print where Python spends the time of one case."""
    engine = make_engine(source, args.rows, StandInChains(source.shape[1], threads=args.threads))
    for request in requests(CASES[name], args.rows, source.shape[1], args.steps + 8):
        engine.submit(request)
    engine.step(), engine.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(args.steps):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


class DecodeTimes:
    """Adds up the seconds inside llama_decode: `wall`, and `cpu` of the calling thread."""

    def __init__(self) -> None:
        self._decode = lib().llama_decode
        self.wall = self.cpu = 0.0

    def __call__(self, *args: Any) -> int:
        start, cpu_start = time.perf_counter(), time.thread_time()
        code: int = self._decode(*args)
        self.wall += time.perf_counter() - start
        self.cpu += time.thread_time() - cpu_start
        return code


def measure_model(names: Sequence[str], args: argparse.Namespace) -> None:
    """Measure the cases in a real model, row by row and together in turn."""
    options = RunOptions(args.rows * 96, threads=args.threads, threads_batch=args.threads)
    decode = DecodeTimes()
    with open_runner(args.model, options, slots=args.rows) as runner:
        engine, native = runner.engine, runner.engine.resources.native
        assert isinstance(native, NativeChains)
        can_plan = native.can_plan
        lib().llama_decode = decode
        for name in names:
            times = {True: Times(), False: Times()}
            for serial in (True, False) * 2:
                native.can_plan = (lambda chain: False) if serial else can_plan  # type: ignore[method-assign]
                for request in requests(CASES[name], args.rows, native.n_vocab, args.steps):
                    engine.submit(request)
                while engine.is_busy:
                    decode.wall = decode.cpu = 0.0
                    start, cpu_start = time.perf_counter(), time.thread_time()
                    events = engine.step()
                    wall, cpu = time.perf_counter() - start, time.thread_time() - cpu_start
                    if sum(event.token is not None for event in events) == args.rows:
                        times[serial].wall.append((wall - decode.wall) * 1e3)
                        times[serial].cpu.append((cpu - decode.cpu) * 1e3)
            print(f"{name}, {args.model.name}")
            for serial, spent in times.items():
                print(f"  {'row by row' if serial else 'together':20} {spent}", flush=True)


def main() -> None:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default=",".join(CASES), help="names of cases")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--profile", metavar="NAME")
    args = parser.parse_args()
    names = args.only.split(",")
    if args.model:
        measure_model(names, args)
        return
    source = make_logits(args.vocabulary)
    if args.profile:
        profile(args.profile, args, source)
        return
    for name in names:
        measure(name, args, source)


if __name__ == "__main__":
    main()
