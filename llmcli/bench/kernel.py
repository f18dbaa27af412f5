"""pp and tg: how fast the model reads a prompt and writes tokens, as llama-bench measures it.

Forward passes alone: random tokens, no sampling, no tokenizing (tools/llama-bench/llama-bench.cpp,
test_prompt and test_gen). Each token of a generation is timed, so there are percentiles too.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from llmcli.bench.grid import Test
from llmcli.hardware.reading import Pace, pace
from llmcli.runtime.binding.context import Aborted, Context, ContextOptions, Rows, open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.interrupt import on_interrupt
from llmcli.runtime.request import percentile

SEED = 0x11

Pass = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured: llama-bench's model columns."""

    filename: str
    kind: str
    nbytes: int
    n_params: int
    pace: Pace | None = None  # tokens a word, where somebody is to be told how fast that is to read


@dataclass(frozen=True, slots=True)
class Result:
    """One test's samples: nanoseconds a repetition, and every generated token's milliseconds."""

    subject: Subject
    test: Test
    began: str
    samples_ns: tuple[int, ...]
    tokens_ms: tuple[float, ...]

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second, repetition by repetition; the depth does not count."""
        return [(self.test.n_prompt + self.test.n_gen) * 1e9 / ns for ns in self.samples_ns]

    @property
    def itl_ms(self) -> dict[str, float] | None:
        """Percentiles of the time of one generated token; None for a prompt test."""
        if not self.tokens_ms:
            return None
        values = list(self.tokens_ms)
        ranks = {f"p{round(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.95, 0.99)}
        return {**ranks, "max": max(values)}


def average(values: list[float]) -> float:
    """The mean."""
    return statistics.fmean(values)


def deviation(values: list[float]) -> float:
    """The sample standard deviation, 0 for a single value, as llama-bench."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


@contextmanager
def subject(path: Path, gpu_layers: int) -> Iterator[tuple[Model, Subject]]:
    """The model to be measured, loaded, with its columns."""
    with open_model(path, gpu_layers=gpu_layers) as model:
        read = pace(lambda text: model.tokenize(text, special=False))
        yield model, Subject(str(path), model.description, model.nbytes, model.n_params, read)


def measure(model: Model, about: Subject, test: Test, repetitions: int, *, warmup: bool = True) -> Result:
    """Run one test `repetitions` times in one context, after one run that does not count."""
    options = ContextOptions(
        test.n_prompt + test.n_gen + test.n_depth, test.n_batch, min(test.n_ubatch, test.n_batch), 1,
        test.n_threads, test.n_threads, test.type_k, test.type_v, test.flash_attn,
    )  # fmt: skip
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with open_context(model, options) as context, _stopped(context):
        # Checked and laid out before the clock starts: llama-bench's loop around the library costs nothing, ours would.
        random_passes = RandomPasses(context, model)
        depth = random_passes.prompt(0, test.n_depth)
        prompt = random_passes.prompt(test.n_depth, test.n_prompt)
        steps = random_passes.steps(test.n_depth + test.n_prompt, test.n_gen)
        if warmup:
            # As llama-bench: a prompt test warms up with its whole prompt, a generation with one token.
            run_passes(random_passes.prompt(0, test.n_prompt))
            run_passes(random_passes.steps(test.n_prompt, min(test.n_gen, 1)))
        samples = []
        tokens: list[float] = []
        for _ in range(repetitions):
            context.clear()
            run_passes(depth)
            start = time.perf_counter_ns()
            run_passes(prompt)
            stamps = run_passes(steps)
            samples.append(time.perf_counter_ns() - start)
            tokens += [(after - before) / 1e6 for before, after in pairwise(stamps)]
    return Result(about, test, began, tuple(samples), tuple(tokens))


@contextmanager
def _stopped(context: Context) -> Iterator[None]:
    """Let Ctrl-C end the running pass; raises KeyboardInterrupt then."""
    with on_interrupt(context.interrupt):
        try:
            yield
        except Aborted:
            raise KeyboardInterrupt from None


def run_passes(passes: Sequence[Pass]) -> list[int]:
    """Compute the passes one after the other; the time before the first and after each, in nanoseconds."""
    clock = time.perf_counter_ns
    stamps = [clock()]
    for forward in passes:
        forward()
        stamps.append(clock())
    return stamps


class RandomPasses:
    """Forward passes over random tokens for one context, ready to be called."""

    def __init__(self, context: Context, model: Model) -> None:
        self.context, self.n_batch, self.n_vocab = context, context.n_batch, context.n_vocab
        self.first = model.bos if model.add_bos else None
        self.random = random.Random(SEED)

    def prompt(self, start: int, count: int) -> list[Pass]:
        """A prompt of `count` tokens from position `start`, a batch a pass."""
        passes = []
        for at in range(start, start + count, self.n_batch):
            size = min(self.n_batch, start + count - at)
            tokens = [self._token(at + index) for index in range(size)]
            rows = Rows(tokens, range(at, at + size), [0] * size, [False] * (size - 1) + [True])
            passes.append(self.context.prepare(rows))
        return passes

    def steps(self, start: int, count: int) -> list[Pass]:
        """`count` tokens from position `start`, one a pass."""
        places = range(start, start + count)
        return [self.context.prepare(Rows((self._token(at),), (at,), (0,), (True,))) for at in places]

    def _token(self, position: int) -> int:
        if position == 0 and self.first is not None:
            return self.first
        return self.random.randrange(self.n_vocab)
