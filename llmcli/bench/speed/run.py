"""Measurement of many tests with one model file. The model is loaded only once for each number of
GPU layers. A progress bar is shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from llmcli.bench.speed import measure, memory_check, sampling_overhead, sweep
from llmcli.bench.speed.bandwidth_share import bandwidth_share
from llmcli.bench.speed.depth_states import DepthStates
from llmcli.bench.speed.measure import ModelUnderTest, SpeedResult
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.planning.measurements.product_trial import choose_products
from llmcli.runtime import kv_size
from llmcli.runtime.binding.model import Model
from llmcli.types import ProgressBar, ProgressDisplay
from quant.model_file import load_checks, read_header


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """How tests are measured.

    `is_sweep`: the tests will be compared with each other, so each round measures every test once,
    and impossible tests are left out. `with_sampling`: also measure generation with sampling.
    `bandwidth`: the machine's memory bandwidth in bytes per second; None: unknown.
    """

    repetitions: int = 5
    warmup: bool = True
    is_sweep: bool = False
    with_sampling: bool = False
    bandwidth: float | None = None
    # where the measured speeds of both kinds of products are saved (product_trial.py); None: llmcli's
    # own products are used for all types
    config: Config | None = None


def run_tests(
    path: Path,
    tests: list[SpeedTest],
    settings: SpeedSettings,
    watcher: ProgressDisplay,
    on_result: Callable[[SpeedResult], SpeedResult] = lambda result: result,
) -> list[SpeedResult]:
    """Measure the tests in order. Raises UserError for a damaged file or an empty list of tests.

    `on_result` is called with each result as soon as it is complete. Its return value replaces the
    result, for example one with a number in the history.
    """
    if not tests:
        raise UserError("no test to run", hint="give -p or -n a number above 0, e.g. -p 512 -n 128")
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    if settings.is_sweep:
        tests = sweep.allowed_tests(tests, header.metadata)
    for test in tests:
        kv_size.check_cache(header.metadata, test.type_k, test.type_v)
    memory_check.require_memory(header, tests, watcher)
    results: list[SpeedResult] = []
    with watcher.bar(
        f"bench {path.name}",
        len(tests) * (settings.repetitions if settings.is_sweep else 1),
        "tests",
    ) as bar:
        for placement, grouped in groupby(tests, key=lambda test: test.placement):
            group = list(grouped)
            if settings.config is not None:
                threads = max(test.n_threads for test in group)
                left_to_ggml = choose_products(header, placement, threads, settings.config)
                placement = replace(placement, ggml_types=left_to_ggml)
            with measure.open_model_under_test(path, placement) as (model, about):
                for measured in _measure_tests(
                    group, settings, _ModelBench(model, about, settings, bar)
                ):
                    complete = replace(
                        measured,
                        bandwidth=settings.bandwidth,
                        bandwidth_share=bandwidth_share(header, measured, settings.bandwidth),
                    )
                    results.append(on_result(complete))
    return results


def _measure_tests(
    tests: list[SpeedTest], settings: SpeedSettings, bench: "_ModelBench"
) -> Iterator[SpeedResult]:
    if settings.is_sweep:
        yield from sweep.measure_rounds(tests, settings.repetitions, bench.measure_once)
        return
    for test in tests:
        yield from bench.measure(test)


class _ModelBench:
    """A loaded model. Its tests are measured one after another and share saved KV states."""

    def __init__(
        self, model: Model, about: ModelUnderTest, settings: SpeedSettings, bar: ProgressBar
    ) -> None:
        self.model, self.about, self.settings, self.bar = model, about, settings, bar
        self.depths = DepthStates()

    def measure(self, test: SpeedTest) -> tuple[SpeedResult, ...]:
        """Measure all repetitions of a test. Returns the result of decoding alone. If sampling was
        requested and the test generates tokens, returns the result with sampling, too.
        """
        settings = self.settings
        tick = self._tick(test, settings.repetitions)
        if settings.with_sampling and test.n_gen:
            results: tuple[SpeedResult, ...] = sampling_overhead.measure_with_sampling(
                self.model,
                self.about,
                test,
                settings.repetitions,
                warmup=settings.warmup,
                depths=self.depths,
                on_repetition=tick,
            )
        else:
            results = (self._measure_decoding(test, settings.repetitions, tick),)
        self.bar.advance(1)
        return results

    def measure_once(self, test: SpeedTest) -> SpeedResult:
        """Measure one repetition of a test in a sweep."""
        result = self._measure_decoding(test, 1, self._tick(test, 1))
        self.bar.advance(1)
        return result

    def _measure_decoding(
        self, test: SpeedTest, count: int, tick: Callable[[int], None]
    ) -> SpeedResult:
        return measure.measure_test(
            self.model,
            self.about,
            test,
            count,
            warmup=self.settings.warmup,
            depths=self.depths,
            on_repetition=tick,
        )

    def _tick(self, test: SpeedTest, count: int) -> Callable[[int], None]:
        """Return a callback that shows the test and the current repetition in the progress bar."""
        return lambda number: self.bar.describe(
            f"bench {test.title}" + (f", {number + 1} of {count}" if count > 1 else "")
        )
