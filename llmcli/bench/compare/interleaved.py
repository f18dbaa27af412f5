"""Interleaved speed comparison of two models, or of one model with two settings. They are called
side A and side B. Both are loaded at the same time, and the measurement alternates between A and B
every few tokens, so that a disturbance of the machine affects both.

The first tokens after a switch are slower, because the CPU caches contain the weights of the other
side, or because threads went to sleep. Therefore each measurement computes some tokens without
timing them first ("settling"). Two sides with the same model file share the weights and, if
possible, the threads. They need no settling and alternate after every token.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from llmcli.bench.speed.measure import ModelUnderTest, build_context_options, measure_test
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import SETTLING_SECONDS, RandomPasses, run_passes
from llmcli.bench.statistics import paired_test
from llmcli.bench.statistics.paired_test import Comparison, Design, Measure
from llmcli.planning.dry_runs.memory_plan import DeviceMemory, open_memory_planner
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context import Aborted, Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.interrupt import on_interrupt
from llmcli.types import ProgressDisplay
from quant.model_file import load_checks, read_header

MAX_SETTLING_PASSES = 16  # maximum number of tokens (or prompts) before the timed ones
TIMED_PER_SETTLING = 2  # number of timed tokens for each token before them
# Up to this depth, the KV cache is small compared with the weights.
SHORT_DEPTH_TOKENS = 512
LONG_SECONDS = 10 * SETTLING_SECONDS  # a measurement that takes this long needs no tokens before it

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ModelTest:
    """Side A or side B of a comparison: a model file, and the test to run on it. Both sides have
    the same numbers of prompt, generated and depth tokens.
    """

    path: Path
    test: SpeedTest

    @property
    def weights_key(self) -> tuple[Path, ModelPlacement]:
        """The model file and its placement. Sides with equal keys can share one loaded copy of the
        weights.
        """
        return self.path, self.test.placement

    def context_options(self) -> ContextOptions:
        """Return the options of the llama.cpp context in which this side is measured."""
        test = self.test
        cells = (
            test.n_depth
            + test.n_prompt
            + test.n_gen
            + MAX_SETTLING_PASSES * (1 + TIMED_PER_SETTLING) * bool(test.n_gen)
        )
        return build_context_options(test, cells)


@dataclass(frozen=True, slots=True)
class MeasurementSize:
    """How many tokens one call of a measurement computes. For a prompt test, it counts whole
    prompts instead of tokens.

    `n_settling`: computed first and not timed. `n_timed`: timed after that.
    """

    n_settling: int
    n_timed: int


class GenerationMeasurement:
    """Measures the speed of token generation (the test "tg"). Each call times the next few tokens.
    When all tokens of the test are generated, the context is set back to the test's depth.
    """

    def __init__(
        self, context: Context, model: Model, test: SpeedTest, size: MeasurementSize
    ) -> None:
        self.context, self.depth, self.size = context, test.n_depth, size
        passes, length = RandomPasses(context, model), size.n_settling + size.n_timed
        self.depth_passes = passes.prompt_passes(0, test.n_depth)
        self.token_passes = passes.token_passes(
            test.n_depth, math.ceil(test.n_gen / length) * length
        )
        self.next_pass = 0
        rewind(context, 0, self.depth_passes)

    def __call__(self) -> float:
        """Time the next tokens, and return tokens per second."""
        if self.next_pass == len(self.token_passes):
            rewind(self.context, self.depth, self.depth_passes)
            self.next_pass = 0
        middle = self.next_pass + self.size.n_settling
        end = middle + self.size.n_timed
        run_passes(self.token_passes[self.next_pass : middle])
        began, *_, ended = run_passes(self.token_passes[middle:end])
        self.next_pass = end
        return self.size.n_timed * 1e9 / (ended - began)


class PromptMeasurement:
    """Measures the speed of prompt processing (the test "pp"). Each call times one complete
    prompt.
    """

    def __init__(
        self, context: Context, model: Model, test: SpeedTest, size: MeasurementSize
    ) -> None:
        self.context, self.test, self.size = context, test, size
        passes = RandomPasses(context, model)
        self.depth_passes = passes.prompt_passes(0, test.n_depth)
        self.prompt_passes = passes.prompt_passes(test.n_depth, test.n_prompt)
        rewind(context, 0, self.depth_passes)

    def __call__(self) -> float:
        """Time one prompt, and return tokens per second."""
        for _ in range(self.size.n_settling):
            self._nanoseconds()
        return self.test.n_prompt * 1e9 / self._nanoseconds()

    def _nanoseconds(self) -> int:
        rewind(self.context, self.test.n_depth, self.depth_passes)
        began, *_, ended = run_passes(self.prompt_passes)
        return ended - began


def rewind(context: Context, depth: int, depth_passes: Sequence[Callable[[], None]]) -> None:
    """Set the context back to its first `depth` tokens. A recurrent model's memory cannot be
    truncated; then clear the context and compute these tokens again with `depth_passes`.
    """
    if not (depth and context.trim(0, depth)):
        context.clear()
        run_passes(depth_passes)


def compare_tests(
    pairs: Sequence[tuple[ModelTest, ModelTest]],
    design: Design,
    watcher: ProgressDisplay,
    in_turn: bool | None = None,
) -> list[Comparison]:
    """Compare side A and side B in each of several tests, and return one comparison for each test.
    The error probability of `design` is divided among the tests.

    `in_turn`: load only one side at a time; None: do so only if both do not fit into memory
    together. Raises UserError for a damaged file or for settings that llama.cpp refuses, and
    KeyboardInterrupt on Ctrl-C.
    """
    for side in {side.path: side for pair in pairs for side in pair}.values():
        load_checks.check_loadable(read_header.read_header(side.path))
    for pair in pairs:
        for side in pair:
            kv_size.check_cache(
                read_header.read_header(side.path).metadata, side.test.type_k, side.test.type_v
            )
    test_design = replace(design, confidence=1 - (1 - design.confidence) / len(pairs))
    if in_turn is None:
        in_turn = not all(fit_in_memory(*pair) for pair in pairs)
    if in_turn:
        watcher.note(
            "the models do not fit into memory at the same time: each one is loaded"
            f" {test_design.min_pairs} times in turn"
        )
    comparisons = []
    with watcher.bar("compare", len(pairs), "tests") as bar, ExitStack() as exit_stack:
        models = {} if in_turn else _models(pairs, exit_stack)
        for a, b in pairs:
            bar.describe(f"compare {a.test.name}")
            with (
                _reloaded(a, b)
                if in_turn
                else open_pair(models[a.weights_key], models[b.weights_key], a, b) as (
                    measure_a,
                    measure_b,
                    tick,
                )
            ):
                comparisons.append(
                    paired_test.compare_pairs(measure_a, measure_b, test_design, tick=tick)
                )
            bar.advance(1)
    return comparisons


def _models(
    pairs: Sequence[tuple[ModelTest, ModelTest]], stack: ExitStack
) -> dict[tuple[Path, ModelPlacement], Model]:
    wanted = dict.fromkeys(side.weights_key for pair in pairs for side in pair)
    return {key: stack.enter_context(open_model(*key)) for key in wanted}


@contextmanager
def open_pair(
    model_a: Model, model_b: Model, a: ModelTest, b: ModelTest
) -> Iterator[tuple[Measure, Measure, Tick]]:
    """Open the contexts of both sides at the same time, and warm them up. Yields a function that
    measures side A, one that measures side B, and one to call after each pair of measurements.

    Ctrl-C ends the running forward pass. If it arrives between two passes, the third function
    raises KeyboardInterrupt.

    The position of a context in memory changes its speed slightly, and depends on the order of
    opening. Therefore each side has two contexts, opened in the order A B B A, and its measurements
    alternate between them.
    """
    stopped = threading.Event()
    with ExitStack() as stack:
        order = ((model_a, a), (model_b, b), (model_b, b), (model_a, a))
        contexts = [
            stack.enter_context(open_context(model, side.context_options()))
            for model, side in order
        ]

        def stop() -> None:
            stopped.set()
            for context in contexts:
                context.interrupt()

        def tick() -> None:
            if stopped.is_set():
                raise KeyboardInterrupt

        stack.enter_context(on_interrupt(stop))
        try:
            a_first, b_first, b_last, a_last = (
                (context, model, side.test)
                for context, (model, side) in zip(contexts, order, strict=True)
            )
            ready = (a_first, b_first, a_last, b_last)
            size = plan_measurement(a, b, max(warm_up(*opened) for opened in ready))
            measures = [
                (GenerationMeasurement if opened[2].n_gen else PromptMeasurement)(*opened, size)
                for opened in ready
            ]
            yield alternate(measures[::2]), alternate(measures[1::2]), tick
        except Aborted:
            raise KeyboardInterrupt from None


def alternate(measures: Sequence[Measure]) -> Measure:
    """Return a function that calls one of the given functions at each call, in turn."""
    turns = cycle(measures)
    return lambda: next(turns)()


def warm_up(context: Context, model: Model, test: SpeedTest) -> float:
    """Compute a prompt (for a prompt test) or a few tokens twice. Returns the seconds of the second
    prompt, or of the last token.
    """
    passes = RandomPasses(context, model)
    work = passes.token_passes(0, 4) if test.n_gen else passes.prompt_passes(0, test.n_prompt)
    run_passes(work)
    context.clear()
    *_, before, after = run_passes(work)
    context.clear()
    return (after - before) / 1e9 * (1 if test.n_gen else len(work))


def plan_measurement(a: ModelTest, b: ModelTest, seconds: float) -> MeasurementSize:
    """Return how many tokens (or prompts) each call of a measurement computes. `seconds`: the time
    of one token (or prompt) on the slower side.
    """
    alike = (
        a.weights_key == b.weights_key
        and a.test.n_threads == b.test.n_threads
        and a.test.n_depth <= SHORT_DEPTH_TOKENS
    )
    settling = (
        0
        if seconds >= LONG_SECONDS
        else min(MAX_SETTLING_PASSES, math.ceil(SETTLING_SECONDS / seconds))
    )
    if a.test.n_prompt:
        return MeasurementSize(0 if alike else settling, 1)
    return (
        MeasurementSize(0, 1)
        if alike
        else MeasurementSize(max(1, settling), max(1, TIMED_PER_SETTLING * settling))
    )


@contextmanager
def _reloaded(a: ModelTest, b: ModelTest) -> Iterator[tuple[Measure, Measure, Tick]]:
    """Yield the functions of `open_pair` for sides that do not fit into memory together. Each
    measurement loads the model, warms up and runs the whole test.
    """

    def once(side: ModelTest) -> float:
        with open_model(*side.weights_key) as model:
            about = ModelUnderTest(str(side.path), "", 0, 0)
            return measure_test(model, about, side.test, 1).samples_ts[0]

    yield lambda: once(a), lambda: once(b), lambda: None


def fit_in_memory(a: ModelTest, b: ModelTest) -> bool:
    """Return whether every device has enough free memory for both sides at once, according to their
    memory plans. Also return True if the free memory is unknown.
    """
    needed: dict[str, int] = {}
    free: dict[str, int] = {}
    for number, side in enumerate((a, b)):
        header = read_header.read_header(side.path)
        with open_memory_planner(header, side.context_options(), side.test.placement) as plan:
            shares = plan.memory_plan().devices
        for share in shares:
            nbytes = _bytes(share, includes_weights=not number or a.weights_key != b.weights_key)
            needed[share.device] = needed.get(share.device, 0) + nbytes
            if share.available is not None:
                free[share.device] = min(share.available, free.get(share.device, share.available))
    return all(needed[device] <= available for device, available in free.items())


def _bytes(share: DeviceMemory, includes_weights: bool) -> int:
    """Return the bytes that a side's two contexts take on a device. `weights`: also count the
    weights; False if they are shared with the other side, which already counts them.
    """
    context_bytes = (share.kv or 0) + (share.compute or 0) + share.output
    return (
        2 * context_bytes
        + ((share.weights or 0) + (share.repacked or 0) - (share.droppable or 0)) * includes_weights
    )
