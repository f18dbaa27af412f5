"""pp and tg: how fast the model reads a prompt and writes tokens, as llama-bench measures it.

Forward passes alone: random tokens, no sampling, no tokenizing (passes.py). Each step of a
generation is timed, so there are percentiles too.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from llmcli.bench.depth import Depths
from llmcli.bench.grid import Test
from llmcli.bench.passes import RandomPasses, run_passes
from llmcli.hardware.reading import Pace, pace
from llmcli.runtime.binding import gemm
from llmcli.runtime.binding.context import Context, ContextOptions, open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.request import percentile
from llmcli.runtime.stopping import stopped


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured: llama-bench's model columns."""

    filename: str
    kind: str
    nbytes: int
    n_params: int
    pace: Pace | None = None  # tokens a word, where somebody is to be told how fast that is to read


@dataclass(frozen=True, slots=True)
class Extra:
    """What sampling and detokenizing add to a token, in milliseconds, with a 95 % interval; None:
    too few pairs for it.

    `share`: of the time of decoding alone.
    """

    ms: float
    low: float | None
    high: float | None
    share: float


@dataclass(frozen=True, slots=True)
class Result:
    """One test's samples: nanoseconds a repetition, and every step's milliseconds: the gap between
    two tokens of a sequence. `extra`: it was measured with the sampler chain and detokenizing,
    which added so much. `bandwidth` is this machine's, bytes read a second, `reached` the part of
    it that was used; None: unknown. `id` is its number in the history.
    """

    subject: Subject
    test: Test
    began: str
    samples_ns: tuple[int, ...]
    tokens_ms: tuple[float, ...]
    extra: Extra | None = None
    bandwidth: float | None = None
    reached: float | None = None
    id: int | None = None

    @property
    def samples_ts(self) -> list[float]:
        """Tokens of all sequences per second, repetition by repetition; the depth does not count."""
        return [self.test.tokens * 1e9 / ns for ns in self.samples_ns]

    @property
    def each_ts(self) -> float:
        """Mean tokens per second of one sequence."""
        return average(self.samples_ts) / self.test.n_parallel

    @property
    def title(self) -> str:
        """What was measured in a few words: llama-bench's name, and what it has none for."""
        return self.test.title + (" sampled" if self.extra else "")

    @property
    def spread(self) -> float:
        """How much longer the slowest repetition took than the fastest: 0.1 is 10 %."""
        return max(self.samples_ns) / min(self.samples_ns) - 1

    @property
    def itl_ms(self) -> dict[str, float] | None:
        """Percentiles of the gaps between tokens; None for a prompt test."""
        if not self.tokens_ms:
            return None
        values = list(self.tokens_ms)
        ranks = {
            f"p{round(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.95, 0.99)
        }
        return {**ranks, "max": max(values)}


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition."""

    ns: int
    tokens_ms: tuple[float, ...]


def average(values: list[float]) -> float:
    """The mean."""
    return statistics.fmean(values)


def deviation(values: list[float]) -> float:
    """The sample standard deviation, 0 for a single value, as llama-bench."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


@contextmanager
def subject(path: Path, gpu_layers: int) -> Iterator[tuple[Model, Subject]]:
    """The model to be measured, loaded, with its columns."""
    with gemm.used(gemm.PROMPTS), open_model(path, gpu_layers=gpu_layers) as model:
        read = pace(lambda text: model.tokenize(text, special=False))
        yield model, Subject(str(path), model.description, model.nbytes, model.n_params, read)


class Trial:
    """One test in a context of its own, ready to be run any number of times. Made by `ready`."""

    def __init__(self, context: Context, model: Model, test: Test, depths: Depths) -> None:
        self.context, self.model, self.test, self.depths = context, model, test, depths
        # Checked and laid out before the clock starts: llama-bench's loop around the library costs
        # nothing, ours would.
        self.passes = RandomPasses(context, model, test.n_parallel)
        self.prompt = self.passes.prompt(test.n_depth, test.n_prompt)
        self.steps = self.passes.steps(test.n_depth + test.n_prompt, test.n_gen)

    def warm(self) -> None:
        """As llama-bench: a prompt test warms up with its whole prompt, a generation with one
        token.
        """
        self.context.clear()
        run_passes(self.passes.prompt(0, self.test.n_prompt))
        run_passes(self.passes.steps(self.test.n_prompt, min(self.test.n_gen, 1)))

    def run(self) -> Sample:
        """Measure once."""
        self.bring()
        start = time.perf_counter_ns()
        run_passes(self.prompt)
        stamps = run_passes(self.steps)
        return Sample(time.perf_counter_ns() - start, gaps(stamps))

    def bring(self) -> None:
        """Empty the context, and bring its sequences to their depth."""
        self.context.clear()
        self.depths.bring(self.context, self.model, self.test)


def options(test: Test) -> ContextOptions:
    """The context that a test is measured in."""
    cells = (test.n_prompt + test.n_gen + test.n_depth) * test.n_parallel
    return ContextOptions(
        cells,
        test.n_batch,
        min(test.n_ubatch, test.n_batch),
        test.n_parallel,
        test.n_threads,
        test.n_threads,
        test.type_k,
        test.type_v,
        test.flash_attn,
        unified=test.n_parallel == 1,
    )


@contextmanager
def ready(model: Model, test: Test, depths: Depths | None = None) -> Iterator[Trial]:
    """A test in a context of its own; Ctrl-C ends a pass within milliseconds and raises
    KeyboardInterrupt.
    """
    own = gemm.rows("auto", test.n_parallel, guesses=False)
    with gemm.used(own), open_context(model, options(test)) as context, stopped(context):
        yield Trial(context, model, test, depths or Depths())


def measure(
    model: Model,
    about: Subject,
    test: Test,
    repetitions: int,
    *,
    warmup: bool = True,
    depths: Depths | None = None,
    tick: Callable[[int], None] = lambda number: None,
) -> Result:
    """Run one test `repetitions` times, after one run that does not count.

    `depths` keeps what was computed for the depth of an earlier test; `tick` is told each
    repetition before it begins.
    """
    began = moment()
    samples = []
    with ready(model, test, depths) as trial:
        if warmup:
            trial.warm()
        for number in range(repetitions):
            tick(number)
            samples.append(trial.run())
    return result(about, test, began, samples)


def result(
    about: Subject, test: Test, began: str, samples: list[Sample], extra: Extra | None = None
) -> Result:
    """The samples of a test together."""
    gaps_ms = tuple(ms for sample in samples for ms in sample.tokens_ms)
    return Result(about, test, began, tuple(sample.ns for sample in samples), gaps_ms, extra)


def moment() -> str:
    """Now, as llama-bench writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def gaps(stamps: list[int]) -> tuple[float, ...]:
    """Milliseconds between nanoseconds."""
    return tuple((after - before) / 1e6 for before, after in pairwise(stamps))
