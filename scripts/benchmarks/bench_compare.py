#!/usr/bin/env python3
"""How often `llmcli bench compare` calls a difference: of a model and itself, and where one side is
slowed down.

usage: .venv/bin/python scripts/benchmarks/bench_compare.py MODEL.gguf
       [--runs 20] [--slowdown 5] [--seconds 8] [--tokens 128] [--prompt 0] [--threads N]
       [--verbose]

Every run opens its own contexts and is what `llmcli bench compare MODEL MODEL` does, with its
defaults. Runs of the two kinds alternate. The slowdown is planted in B: after each of its passes
the thread spins for that share of the processor time it took, within what is timed. (Of the time on
the clock it would be more than that share wherever others use the machine: waiting is no work.)
Wanted: of 20 runs of a thing and itself at most 1 calls a difference, of 20 with 5 % planted at
least 18 do, and name the slower one. Printed too: how many intervals hold the true ratio.
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
from llmcli.bench.compare.interleaved import Side
from llmcli.bench.speed import parameter_grid
from llmcli.bench.statistics.paired_test import Comparison, Design
from llmcli.ui import UI

Pass = Callable[[], None]


def slowed(forward: Pass, share: float) -> Pass:
    """A pass that takes longer by a share of its own time, whatever that is this time."""

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
    """Let the second of two sides be slower by `share`: each side has two contexts, made in turn."""
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
        interleaved, Generation=plant(interleaved.Generation), Prompt=plant(interleaved.Prompt)
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
        """Counts, and how long and how precise a run was."""
        found = self.found
        called = [one for one in found if one.differs]
        right = [one for one in called if (one.ratio < 1) == (self.truth < 1)]
        held = sum(one.low <= self.truth <= one.high for one in found)
        words = f"{len(called)} of {len(found)} called a difference"
        words += f", {len(right)} of them the right way" if self.truth != 1 else ""
        ratios = sorted(one.ratio for one in found)
        half = statistics.median(one.resolution for one in found)
        pairs, seconds = (
            statistics.median(len(one.a) for one in found),
            statistics.median(self.seconds),
        )
        span = f"{ratios[0]:.4f} to {ratios[-1]:.4f}"
        return (
            f"{self.name}: {words}; {held} intervals hold {self.truth:.4f}, ratios {span}\n"
            f"    median: half an interval {half:.2%}, {pairs:.0f} pairs, {seconds:.1f} s a run; "
            f"{sum(one.noisy for one in found)} called the machine noisy"
        )


def main() -> None:
    """Measure and print; exit 1 where the counts are not what is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--slowdown", type=float, default=5, help="percent")
    parser.add_argument("--seconds", type=float, default=Design().seconds)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--prompt", type=int, default=0, help="measure prompts of so many tokens instead"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--verbose", action="store_true", help="a line for each run")
    asked = parser.parse_args()
    share = asked.slowdown / 100
    tokens = 0 if asked.prompt else asked.tokens
    side = Side(
        asked.model,
        parameter_grid.Test(
            asked.prompt, tokens, 0, 2048, 512, "f16", "f16", asked.threads, -1, "auto"
        ),
    )
    tallies = Tally("A and A", 1.0), Tally(f"B slower by {asked.slowdown:g} %", 1 / (1 + share))
    quiet = UI(json=True)
    for number in range(asked.runs):
        for tally, plant in zip(tallies, (0.0, share), strict=True):
            began = time.monotonic()
            with planted(plant), redirect_stderr(io.StringIO()):  # a line of progress each
                (one,) = interleaved.run([(side, side)], Design(seconds=asked.seconds), quiet)
            tally.seconds.append(time.monotonic() - began)
            tally.found.append(one)
            if asked.verbose:
                print(
                    f"{number + 1:2} {tally.name}: {one.words()} ({len(one.a)} pairs)", flush=True
                )
    print(
        f"{asked.model.name}, {side.test.name}, {asked.threads} threads, {asked.seconds:g} s a run"
    )
    for tally in tallies:
        print(tally.text())
    alike, slow = (sum(one.differs for one in tally.found) for tally in tallies)
    sys.exit(alike > asked.runs / 20 or slow < asked.runs * 0.9)


if __name__ == "__main__":
    main()
