#!/usr/bin/env python3
"""Count how often `llmcli bench compare` reports a difference, with and without a real one.

usage: .venv/bin/python scripts/benchmarks/bench_compare.py MODEL.gguf
       [--runs 20] [--slowdown 5] [--seconds 8] [--tokens 128] [--prompt 0] [--threads N]
       [--verbose]

Every run opens its own contexts and does the same as `llmcli bench compare MODEL MODEL`. Runs of a
model against itself alternate with runs in which B is slowed down: after each of B's passes the
thread spins for a share of the CPU time that the pass took. (A share of wall time would be more
than that share when other programs use the CPU.) Goals: at most 1 of 20 runs of equal sides reports
a difference, and at least 18 of 20 runs with a 5 % slowdown report one and name the slower side.
The script also prints how many intervals contain the true ratio.
"""

import argparse
import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from unittest import mock

from llmcli.bench.compare import interleaved
from llmcli.bench.compare.interleaved import ModelTest
from llmcli.bench.speed import parameter_grid
from llmcli.bench.statistics.paired_test import Comparison, Design
from llmcli.ui import UI

Pass = Callable[[], None]


def slowed(forward: Pass, share: float) -> Pass:
    """Return a pass that takes longer by a share of its own CPU time."""

    def work() -> None:
        began = time.thread_time_ns()
        forward()
        now = time.thread_time_ns()
        end = now + int((now - began) * share)
        while time.thread_time_ns() < end:
            pass

    return work


@contextmanager
def planted(share: float) -> Iterator[None]:
    """Slow down the second of two sides by `share`. Each side has two contexts, made in turn."""
    made: list[object] = []

    def plant(kind: type) -> Callable[..., object]:
        def make(*given: object) -> object:
            side = kind(*given)
            if len(made) % 2:
                side.steps = [slowed(step, share) for step in side.steps]
            made.append(side)
            return side

        return make

    with mock.patch.multiple(
        interleaved,
        Generation=plant(interleaved.GenerationMeasurement),
        Prompt=plant(interleaved.PromptMeasurement),
    ):
        yield
    assert made and not len(made) % 2


class Tally:
    """The runs of one kind, whose true ratio is known."""

    def __init__(self, name: str, truth: float) -> None:
        self.name, self.truth = name, truth
        self.found: list[Comparison] = []
        self.seconds: list[float] = []

    def text(self) -> str:
        """Return the counts, and the duration and precision of the runs."""
        found = self.found
        called = [one for one in found if one.differs]
        right = [one for one in called if (one.ratio < 1) == (self.truth < 1)]
        held = sum(one.low <= self.truth <= one.high for one in found)
        words = f"{len(called)} of {len(found)} report a difference"
        words += f", {len(right)} of them with the right sign" if self.truth != 1 else ""
        ratios = sorted(one.ratio for one in found)
        half = statistics.median(one.resolution for one in found)
        pairs, seconds = (
            statistics.median(len(one.a) for one in found),
            statistics.median(self.seconds),
        )
        span = f"{ratios[0]:.4f} to {ratios[-1]:.4f}"
        return (
            f"{self.name}: {words}; {held} intervals contain {self.truth:.4f}, ratios {span}\n"
            f"    median: half an interval {half:.2%}, {pairs:.0f} pairs, {seconds:.1f} s per run; "
            f"{sum(one.is_noisy for one in found)} report a noisy machine"
        )


def main() -> None:
    """Measure and print; exit with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--slowdown", type=float, default=5, help="percent")
    parser.add_argument("--seconds", type=float, default=Design().seconds)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--prompt", type=int, default=0, help="measure prompts of this many tokens instead"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--verbose", action="store_true", help="print a line for each run")
    asked = parser.parse_args()
    share = asked.slowdown / 100
    tokens = 0 if asked.prompt else asked.tokens
    side = ModelTest(
        asked.model,
        parameter_grid.SpeedTest(
            asked.prompt, tokens, 0, 2048, 512, "f16", "f16", asked.threads, -1, "auto"
        ),
    )
    tallies = Tally("A and A", 1.0), Tally(f"B slower by {asked.slowdown:g} %", 1 / (1 + share))
    quiet = UI(json=True)
    for number in range(asked.runs):
        for tally, plant in zip(tallies, (0.0, share), strict=True):
            began = time.monotonic()
            with planted(plant), redirect_stderr(io.StringIO()):  # each would print its progress
                (one,) = interleaved.compare_tests(
                    [(side, side)], Design(seconds=asked.seconds), quiet
                )
            tally.seconds.append(time.monotonic() - began)
            tally.found.append(one)
            if asked.verbose:
                print(
                    f"{number + 1:2} {tally.name}: {one.describe()} ({len(one.a)} pairs)",
                    flush=True,
                )
    print(
        f"{asked.model.name}, {side.test.name}, {asked.threads} threads, {asked.seconds:g} s per run"
    )
    for tally in tallies:
        print(tally.text())
    alike, slow = (sum(one.differs for one in tally.found) for tally in tallies)
    sys.exit(alike > asked.runs / 20 or slow < asked.runs * 0.9)


if __name__ == "__main__":
    main()
