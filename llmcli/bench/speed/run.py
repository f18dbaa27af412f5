"""Many tests of one model file: each model is loaded once, and a progress bar is shown."""

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
    """How tests are measured.

    `is_sweep`: the tests are compared with each other, so all are measured in every round, and
    unsupported tests are left out. `sampling`: also measure generation with the sampler chain.
    `bandwidth`: the machine's memory bandwidth in bytes per second, None: unknown.
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
    """Measure the tests in order. Raises UserError for a damaged file or an empty list of tests.

    `on_result` receives every result as soon as it is measured; the result that it returns is kept.
    """
    if not tests:
        raise UserError("no test to run", hint="give -p or -n a number above 0, e.g. -p 512 -n 128")
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
                for measured in _measured(list(group), how, _Bench(model, about, how, bar)):
                    complete = replace(
                        measured,
                        bandwidth=how.bandwidth,
                        reached=reached(header, measured, how.bandwidth),
                    )
                    results.append(done(complete))
    return results


def _measured(tests: list[Test], settings: How, bench: "_Bench") -> Iterator[Result]:
    if settings.swept:
        yield from sweep.rounds(tests, settings.repetitions, bench.once)
        return
    for test in tests:
        yield from bench.measure(test)


class _Bench:
    """One loaded model, whose tests are measured one after another."""

    def __init__(self, model: Model, about: Subject, settings: How, bar: Bar) -> None:
        self.model, self.about, self.how, self.bar = model, about, settings, bar
        self.depths = Depths()

    def measure(self, test: Test) -> tuple[Result, ...]:
        """Measure all repetitions of a test: decoding alone, and also with sampling if requested
        and tokens are generated.
        """
        settings, tick = self.how, self._tick(test, self.how.repetitions)
        if settings.sampling and test.n_gen:
            results: tuple[Result, ...] = sampling_overhead.measure(
                self.model,
                self.about,
                test,
                settings.repetitions,
                warmup=settings.warmup,
                depths=self.depths,
                tick=tick,
            )
        else:
            results = (self._alone(test, settings.repetitions, tick),)
        self.bar.advance(1)
        return results

    def once(self, test: Test) -> Result:
        """Measure one repetition of one test of a sweep."""
        result = self._alone(test, 1, self._tick(test, 1))
        self.bar.advance(1)
        return result

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
        """Return a callback that shows the test and the current repetition."""
        return lambda number: self.bar.describe(
            f"bench {test.title}" + (f", {number + 1} of {count}" if count > 1 else "")
        )
