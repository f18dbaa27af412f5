#!/usr/bin/env python3
"""Count how often `llmcli bench compare` reports a difference, with and without a real one.

usage: .venv/bin/python scripts/benchmarks/bench_compare.py MODEL.gguf
       [--runs 20] [--slowdown 5] [--seconds 8] [--tokens 128] [--prompt 0] [--threads N]
       [--verbose]

Every run opens its own contexts and does the same as `llmcli bench compare MODEL MODEL`. Runs of a
model A against itself alternate with runs in which the second side, B, is slowed down: after each
of B's passes the thread spins for a share of the CPU time that the pass took. (A share of the wall
time would slow B down too much when other programs use the CPU.) Goals: at most 1 of 20 runs of
equal sides reports a difference; at least 18 of 20 runs with a 5 % slowdown report a difference and
name the slower side. The script also prints how many confidence intervals contain the true ratio.
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


def slowed_pass(forward: Pass, share: float) -> Pass:
    """Return a pass that runs `forward` and then spins for `share` of the CPU time of `forward`."""

    def work() -> None:
        began = time.thread_time_ns()
        forward()
        now = time.thread_time_ns()
        end = now + int((now - began) * share)
        while time.thread_time_ns() < end:
            pass

    return work


@contextmanager
def slow_second_side(share: float) -> Iterator[None]:
    """Slow down the second side of every comparison by `share` while the context manager is open.

    `interleaved` creates the measurements of the first and the second side alternately, so every
    second one is slowed down.
    """
    measurements: list[object] = []

    def slowing(measurement_class: type, passes_name: str) -> Callable[..., object]:
        def make(*arguments: object) -> object:
            measurement = measurement_class(*arguments)
            if len(measurements) % 2:
                passes = getattr(measurement, passes_name)
                slowed = [slowed_pass(forward, share) for forward in passes]
                setattr(measurement, passes_name, slowed)
            measurements.append(measurement)
            return measurement

        return make

    with mock.patch.multiple(
        interleaved,
        GenerationMeasurement=slowing(interleaved.GenerationMeasurement, "token_passes"),
        PromptMeasurement=slowing(interleaved.PromptMeasurement, "prompt_passes"),
    ):
        yield
    assert measurements and not len(measurements) % 2


class Tally:
    """All runs with the same slowdown, and so with the same true ratio of speeds, B / A."""

    def __init__(self, name: str, true_ratio: float) -> None:
        self.name, self.true_ratio = name, true_ratio
        self.comparisons: list[Comparison] = []
        self.seconds: list[float] = []

    def text(self) -> str:
        """Return two lines: how many runs report a difference and contain the true ratio, and how
        long and how precise the runs are.
        """
        runs = self.comparisons
        reported = [run for run in runs if run.differs]
        correct = [run for run in reported if (run.ratio < 1) == (self.true_ratio < 1)]
        covering = sum(run.low <= self.true_ratio <= run.high for run in runs)
        summary = f"{len(reported)} of {len(runs)} report a difference"
        summary += f", {len(correct)} of them with the right sign" if self.true_ratio != 1 else ""
        ratios = sorted(run.ratio for run in runs)
        half = statistics.median(run.resolution for run in runs)
        pairs, seconds = (
            statistics.median(len(run.a) for run in runs),
            statistics.median(self.seconds),
        )
        span = f"{ratios[0]:.4f} to {ratios[-1]:.4f}"
        return (
            f"{self.name}: {summary}; {covering} intervals contain {self.true_ratio:.4f}, ratios {span}\n"
            f"    median: half an interval {half:.2%}, {pairs:.0f} pairs, {seconds:.1f} s per run; "
            f"{sum(run.is_noisy for run in runs)} report a noisy machine"
        )


def main() -> None:
    """Parse the flags, run the comparisons and print; exit with 1 if a goal is missed."""
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
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--verbose", action="store_true", help="print a line for each run")
    args = parser.parse_args()
    share = args.slowdown / 100
    tokens = 0 if args.prompt else args.tokens
    side = ModelTest(
        args.model,
        parameter_grid.SpeedTest(
            args.prompt, tokens, 0, 2048, 512, "f16", "f16", args.threads, -1, "auto"
        ),
    )
    tallies = Tally("A and A", 1.0), Tally(f"B slower by {args.slowdown:g} %", 1 / (1 + share))
    quiet = UI(json=True)
    for number in range(args.runs):
        for tally, slowdown in zip(tallies, (0.0, share), strict=True):
            began = time.monotonic()
            with (
                slow_second_side(slowdown),
                redirect_stderr(io.StringIO()),  # hides the progress
            ):
                (comparison,) = interleaved.compare_tests(
                    [(side, side)], Design(seconds=args.seconds), quiet
                )
            tally.seconds.append(time.monotonic() - began)
            tally.comparisons.append(comparison)
            if args.verbose:
                print(
                    f"{number + 1:2} {tally.name}: {comparison.describe()} ({len(comparison.a)} pairs)",
                    flush=True,
                )
    print(
        f"{args.model.name}, {side.test.name}, {args.threads} threads, {args.seconds:g} s per run"
    )
    for tally in tallies:
        print(tally.text())
    alike, slow = (sum(comparison.differs for comparison in tally.comparisons) for tally in tallies)
    sys.exit(alike > args.runs / 20 or slow < args.runs * 0.9)


if __name__ == "__main__":
    main()
