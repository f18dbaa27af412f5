"""Measurement of prompt speed (pp) and generation speed (tg), as in llama-bench.

Only forward passes over random tokens are measured, without sampling and tokenizing. Each
generation step is timed separately, so that percentiles of the time per token can be reported.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from llmcli.bench.speed.depth_states import DepthStates
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import RandomPasses, run_passes
from llmcli.hardware.gpu_usage import GpuUsage, UsageSampler
from llmcli.reading_speed import ReadingPace, measure_pace
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.interruptible_pass import interruptible
from llmcli.runtime.requests.request import percentile
from llmcli.units import format_current_time


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """Facts about the measured model, as in llama-bench's columns."""

    filename: str
    description: str
    nbytes: int
    n_params: int
    # tokens per word, to compare the speed with human reading
    reading_pace: ReadingPace | None = None


@dataclass(frozen=True, slots=True)
class SamplingCost:
    """The milliseconds per token that sampling and detokenizing add.

    `low`, `high`: 95 % interval; None if there are too few pairs of measurements. `share`: the
    added time as a fraction of the time of decoding alone.
    """

    ms: float
    low: float | None
    high: float | None
    share: float


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """The result of one test.

    `samples_ns`: nanoseconds of each repetition. `tokens_ms`: milliseconds of each generation step,
    in all repetitions. `sampling_cost`: None if sampling was not measured. `bandwidth`: the
    machine's memory bandwidth in bytes per second, `bandwidth_share`: the fraction of it that the
    test used; None: unknown. `id`: the number of the result in the history; None: not saved.
    `gpus`: the use of NVIDIA GPUs during the repetitions; empty without NVML.
    """

    subject: ModelUnderTest
    test: SpeedTest
    start_time: str
    samples_ns: tuple[int, ...]
    tokens_ms: tuple[float, ...]
    sampling_cost: SamplingCost | None = None
    bandwidth: float | None = None
    bandwidth_share: float | None = None
    id: int | None = None
    gpus: tuple[GpuUsage, ...] = ()

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each repetition, over all sequences. The tokens of the depth are not
        included, because they are computed before the clock starts.
        """
        return [self.test.tokens * 1e9 / ns for ns in self.samples_ns]

    @property
    def each_ts(self) -> float:
        """Tokens per second of one sequence, as a mean over the repetitions."""
        return average(self.samples_ts) / self.test.n_parallel

    @property
    def title(self) -> str:
        """The name of the test as in llama-bench, followed by the number of sequences if there are
        several, and by "sampled" if tokens were sampled.
        """
        return self.test.title + (" sampled" if self.sampling_cost else "")

    @property
    def spread(self) -> float:
        """The fraction by which the slowest repetition took longer than the fastest; 0.1 is
        10 %.
        """
        return max(self.samples_ns) / min(self.samples_ns) - 1

    @property
    def itl_ms(self) -> dict[str, float] | None:
        """Percentiles and maximum of the milliseconds between tokens (inter-token latency); None
        for a prompt test.
        """
        if not self.tokens_ms:
            return None
        values = list(self.tokens_ms)
        ranks = {
            f"p{round(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.95, 0.99)
        }
        return {**ranks, "max": max(values)}


@dataclass(frozen=True, slots=True)
class Repetition:
    """The times of one repetition of a test: its total nanoseconds, and the milliseconds of each
    generation step.
    """

    ns: int
    tokens_ms: tuple[float, ...]


def average(values: list[float]) -> float:
    """Return the mean."""
    return statistics.fmean(values)


def standard_deviation(values: list[float]) -> float:
    """Return the sample standard deviation; 0 for a single value, as in llama-bench."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


@contextmanager
def open_model_under_test(
    path: Path, placement: ModelPlacement
) -> Iterator[tuple[Model, ModelUnderTest]]:
    """Load a model for a measurement. Yields the model and facts about it."""
    with open_model(path, placement) as model:
        reading_pace = measure_pace(lambda text: model.tokenize(text, special=False))
        yield (
            model,
            ModelUnderTest(
                str(path), model.description, model.nbytes, model.n_params, reading_pace
            ),
        )


class SpeedTrial:
    """One test with its own context and its prepared forward passes. It can be measured any number
    of times. `open_trial` creates it.
    """

    def __init__(
        self, context: Context, model: Model, test: SpeedTest, depths: DepthStates
    ) -> None:
        self.context, self.model, self.test, self.depths = context, model, test, depths
        # Prepare the passes before the clock starts, because building batches in Python is slow.
        # (llama-bench builds them while the clock runs, at almost no cost.)
        self.passes = RandomPasses(context, model, test.n_parallel)
        self.prompt = self.passes.prompt_passes(test.n_depth, test.n_prompt)
        self.steps = self.passes.token_passes(test.n_depth + test.n_prompt, test.n_gen)

    def warm_up(self) -> None:
        """Warm up as llama-bench does: for a prompt test, compute the whole prompt; for a
        generation test, compute one token.
        """
        self.context.clear()
        run_passes(self.passes.prompt_passes(0, self.test.n_prompt))
        run_passes(self.passes.token_passes(self.test.n_prompt, min(self.test.n_gen, 1)))

    def measure_once(self) -> Repetition:
        """Measure one repetition of the test."""
        self.restore_depth()
        start = time.perf_counter_ns()
        run_passes(self.prompt)
        stamps = run_passes(self.steps)
        return Repetition(time.perf_counter_ns() - start, milliseconds_between(stamps))

    def restore_depth(self) -> None:
        """Clear the context, and fill its sequences with the tokens of the depth."""
        self.context.clear()
        self.depths.fill_sequences(self.context, self.model, self.test)


def build_context_options(test: SpeedTest, n_ctx: int | None = None) -> ContextOptions:
    """Return the options of the llama.cpp context in which a test is measured. `n_ctx`: number of
    KV cache cells; None: as many as the test has tokens.
    """
    cells = (test.n_prompt + test.n_gen + test.n_depth) * test.n_parallel
    return ContextOptions(
        cells if n_ctx is None else n_ctx,
        test.n_batch,
        min(test.n_ubatch, test.n_batch),
        test.n_parallel,
        test.n_threads,
        test.n_threads,
        test.type_k,
        test.type_v,
        test.flash_attn,
        unified=test.n_parallel == 1,
        offload_kqv=test.placement_options.kv_offload,
        gemm_min_rows=gemm.choose_min_rows("auto", test.n_parallel, has_drafts=False),
    )


@contextmanager
def open_trial(
    model: Model, test: SpeedTest, depths: DepthStates | None = None
) -> Iterator[SpeedTrial]:
    """Open a test with its own context. Ctrl-C ends the running forward pass and raises
    KeyboardInterrupt.
    """
    with (
        open_context(model, build_context_options(test)) as context,
        interruptible(context),
    ):
        yield SpeedTrial(context, model, test, depths or DepthStates())


def measure_test(
    model: Model,
    subject: ModelUnderTest,
    test: SpeedTest,
    repetitions: int,
    *,
    warmup: bool = True,
    depths: DepthStates | None = None,
    on_repetition: Callable[[int], None] = lambda number: None,
) -> SpeedResult:
    """Measure a test `repetitions` times after a warm-up.

    `depths`: KV states saved by earlier tests, which are reused if the depth is the same.
    `on_repetition`: called with the index of each repetition before it starts.
    """
    began = format_current_time()
    samples = []
    with open_trial(model, test, depths) as trial:
        if warmup:
            trial.warm_up()
        with UsageSampler() as usage:
            for number in range(repetitions):
                on_repetition(number)
                samples.append(trial.measure_once())
    return replace(build_result(subject, test, began, samples), gpus=usage.gpus)


def build_result(
    subject: ModelUnderTest,
    test: SpeedTest,
    began: str,
    samples: list[Repetition],
    sampling_cost: SamplingCost | None = None,
) -> SpeedResult:
    """Combine the repetitions of a test into one result. `began`: the start time as text."""
    gaps_ms = tuple(ms for sample in samples for ms in sample.tokens_ms)
    return SpeedResult(
        subject, test, began, tuple(sample.ns for sample in samples), gaps_ms, sampling_cost
    )


def milliseconds_between(stamps: list[int]) -> tuple[float, ...]:
    """Return the milliseconds between consecutive nanosecond time stamps."""
    return tuple((after - before) / 1e6 for before, after in pairwise(stamps))
