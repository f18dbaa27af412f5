"""Many tests over one file: each model loaded once, one after the other, progress shown."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from llmcli.bench.speed import measure as kernel
from llmcli.bench.speed import memory_check, sampling_overhead, sweep
from llmcli.bench.speed.bandwidth_share import reached
from llmcli.bench.speed.depth_states import Depths
from llmcli.bench.speed.measure import Result, Subject
from llmcli.bench.speed.parameter_grid import Test
from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.binding.model import Model
from llmcli.types import Bar, Watcher
from quant.model_file import load_checks, read_header


@dataclass(frozen=True, slots=True)
class How:
    """How tests are measured. `swept`: they are compared with one another, so that all are measured
    in every round, and those that cannot be are left out. `sampling`: generation with the sampler
    chain, too. `bandwidth` is the machine's, None: unknown.
    """

    repetitions: int = 5
    warmup: bool = True
    swept: bool = False
    sampling: bool = False
    bandwidth: float | None = None


def run(
    path: Path,
    tests: list[Test],
    how: How,
    watcher: Watcher,
    done: Callable[[Result], Result] = lambda result: result,
) -> list[Result]:
    """Measure `tests` in order; raises Refusal for a damaged file, UserError where there is nothing
    to run.

    `done` gets every result as soon as it is there, and what it gives is the result.
    """
    if not tests:
        raise UserError(
            "there is no test to run", hint="give -p or -n a number above 0, e.g. -p 512 -n 128"
        )
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    if how.swept:
        tests = sweep.allowed(tests, header.metadata)
    for test in tests:
        kv_size.check_cache(header.metadata, test.type_k, test.type_v)
    memory_check.check(header, tests, watcher)
    results: list[Result] = []
    with watcher.bar(
        f"bench {path.name}", len(tests) * (how.repetitions if how.swept else 1), "tests"
    ) as bar:
        for layers, group in groupby(tests, key=lambda test: test.n_gpu_layers):
            with kernel.subject(path, layers) as (model, about):
                for one in _measured(list(group), how, _Bench(model, about, how, bar)):
                    whole = replace(
                        one, bandwidth=how.bandwidth, reached=reached(header, one, how.bandwidth)
                    )
                    results.append(done(whole))
    return results


def _measured(tests: list[Test], how: How, bench: "_Bench") -> Iterator[Result]:
    if how.swept:
        yield from sweep.rounds(tests, how.repetitions, bench.once)
        return
    for test in tests:
        yield from bench.measure(test)


class _Bench:
    """One loaded model, its tests one after the other."""

    def __init__(self, model: Model, about: Subject, how: How, bar: Bar) -> None:
        self.model, self.about, self.how, self.bar = model, about, how, bar
        self.depths = Depths()

    def measure(self, test: Test) -> tuple[Result, ...]:
        """All repetitions of one test: decoding alone, and with sampling where that is wanted and
        tokens are drawn.
        """
        how, tick = self.how, self._tick(test, self.how.repetitions)
        if how.sampling and test.n_gen:
            found: tuple[Result, ...] = sampling_overhead.measure(
                self.model,
                self.about,
                test,
                how.repetitions,
                warmup=how.warmup,
                depths=self.depths,
                tick=tick,
            )
        else:
            found = (self._alone(test, how.repetitions, tick),)
        self.bar.advance(1)
        return found

    def once(self, test: Test) -> Result:
        """One repetition of one test of a sweep."""
        found = self._alone(test, 1, self._tick(test, 1))
        self.bar.advance(1)
        return found

    def _alone(self, test: Test, count: int, tick: Callable[[int], None]) -> Result:
        return kernel.measure(
            self.model,
            self.about,
            test,
            count,
            warmup=self.how.warmup,
            depths=self.depths,
            tick=tick,
        )

    def _tick(self, test: Test, count: int) -> Callable[[int], None]:
        """Shows the test, and which of its repetitions is measured."""
        return lambda number: self.bar.describe(
            f"bench {test.title}" + (f", {number + 1} of {count}" if count > 1 else "")
        )
