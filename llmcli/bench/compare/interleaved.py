"""Interleaved comparison: two sides are open at once and measured in turn, a few tokens each.

The cost of a switch is not measured: after another model's weights passed through the caches, or
another number of threads slept, the first tokens take up to a fifth longer. Sides that are alike
share weights and threads, and alternate after every token, so that disturbances affect both.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from llmcli.bench.speed.measure import Subject, measure
from llmcli.bench.speed.parameter_grid import Test
from llmcli.bench.speed.random_passes import RandomPasses, run_passes
from llmcli.bench.statistics import paired_test
from llmcli.bench.statistics.paired_test import Comparison, Design, Measure
from llmcli.planning.memory_plan import Share, planner
from llmcli.runtime import kv_size
from llmcli.runtime.binding.context import Aborted, Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.kernels import gemm
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.interrupt import on_interrupt
from llmcli.types import Watcher
from quant.model_file import load_checks, read_header

SETTLING = 0.05  # seconds after a switch until the speed is stable again
MOST_SETTLING = 16  # tokens, or prompts
TIMED = 2  # timed tokens per settling token
SHORT = 512  # up to this number of tokens, the KV cache is small compared with the weights
LONG = 10 * SETTLING  # seconds; a measurement that takes this long needs no settling

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Side:
    """A model file and the test to run on it. Both sides of a comparison have the same prompt,
    tokens and depth.
    """

    path: Path
    test: Test

    @property
    def loaded(self) -> tuple[Path, int]:
        """What two sides must have in common to share their weights: the file and the GPU
        layers.
        """
        return self.path, self.test.n_gpu_layers

    def options(self) -> ContextOptions:
        """Return the options of the context in which the side is measured."""
        test = self.test
        cells = (
            test.n_depth
            + test.n_prompt
            + test.n_gen
            + MOST_SETTLING * (1 + TIMED) * bool(test.n_gen)
        )
        return ContextOptions(
            cells,
            test.n_batch,
            min(test.n_ubatch, test.n_batch),
            1,
            test.n_threads,
            test.n_threads,
            test.type_k,
            test.type_v,
            test.flash_attn,
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """The size of one measurement: tokens (or prompts) to settle, which are not timed, then timed
    ones.
    """

    settling: int
    timed: int


class Generation:
    """Measures generation (tg). Every call times the next few tokens; after the last one it rewinds
    to the depth.
    """

    def __init__(self, context: Context, model: Model, test: Test, slot: Slot) -> None:
        self.context, self.depth, self.slot = context, test.n_depth, slot
        passes, length = RandomPasses(context, model), slot.settling + slot.timed
        self.before = passes.prompt(0, test.n_depth)
        self.steps = passes.steps(test.n_depth, math.ceil(test.n_gen / length) * length)
        self.at = 0
        rewind(context, 0, self.before)

    def __call__(self) -> float:
        """Return the tokens per second."""
        if self.at == len(self.steps):
            rewind(self.context, self.depth, self.before)
            self.at = 0
        middle = self.at + self.slot.settling
        end = middle + self.slot.timed
        run_passes(self.steps[self.at : middle])
        began, *_, ended = run_passes(self.steps[middle:end])
        self.at = end
        return self.slot.timed * 1e9 / (ended - began)


class Prompt:
    """Measures prompts (pp). Every call times one prompt."""

    def __init__(self, context: Context, model: Model, test: Test, slot: Slot) -> None:
        self.context, self.test, self.slot = context, test, slot
        passes = RandomPasses(context, model)
        self.before = passes.prompt(0, test.n_depth)
        self.steps = passes.prompt(test.n_depth, test.n_prompt)
        rewind(context, 0, self.before)

    def __call__(self) -> float:
        """Return the tokens per second."""
        for _ in range(self.slot.settling):
            self._nanoseconds()
        return self.test.n_prompt * 1e9 / self._nanoseconds()

    def _nanoseconds(self) -> int:
        rewind(self.context, self.test.n_depth, self.before)
        began, *_, ended = run_passes(self.steps)
        return ended - began


def rewind(context: Context, depth: int, before: Sequence[Callable[[], None]]) -> None:
    """Restore the context to the tokens that `before` computes: by trimming if its memory can,
    otherwise by computing them again.
    """
    if not (depth and context.trim(0, depth)):
        context.clear()
        run_passes(before)


def run(
    pairs: Sequence[tuple[Side, Side]], design: Design, watcher: Watcher, apart: bool | None = None
) -> list[Comparison]:
    """Compare two sides in each of several tests; the error probability of `design` covers all
    tests.

    `in_turn`: load the sides one after the other; None: only if they do not fit into memory
    together. Raises UserError for a damaged file and for settings that llama.cpp refuses, and
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
    if apart is None:
        apart = not all(fit(*pair) for pair in pairs)
    if apart:
        watcher.note(
            "the models do not fit into memory at the same time: each one is loaded"
            f" {test_design.least} times in turn"
        )
    comparisons = []
    with watcher.bar("compare", len(pairs), "tests") as bar, ExitStack() as stack:
        models = {} if apart else _models(pairs, stack)
        for a, b in pairs:
            bar.describe(f"compare {a.test.name}")
            with (
                _reloaded(a, b)
                if apart
                else together(models[a.loaded], models[b.loaded], a, b) as (
                    measure_a,
                    measure_b,
                    tick,
                )
            ):
                comparisons.append(
                    paired_test.compare(measure_a, measure_b, test_design, tick=tick)
                )
            bar.advance(1)
    return comparisons


def _models(pairs: Sequence[tuple[Side, Side]], stack: ExitStack) -> dict[tuple[Path, int], Model]:
    stack.enter_context(gemm.enabled(gemm.MIN_PROMPT_ROWS))
    wanted = dict.fromkeys(side.loaded for pair in pairs for side in pair)
    return {key: stack.enter_context(open_model(key[0], gpu_layers=key[1])) for key in wanted}


@contextmanager
def together(
    model_a: Model, model_b: Model, a: Side, b: Side
) -> Iterator[tuple[Measure, Measure, Tick]]:
    """Open both sides in contexts that exist at the same time, and warm them up. Yields a
    measurement of each side, and a function to call between pairs.

    Ctrl-C ends the running pass; if it arrives between two passes, the yielded function raises
    KeyboardInterrupt.

    A context opened later is placed elsewhere in memory, which makes it up to half a percent slower
    or faster. So each side has two contexts, opened in the order A B B A and measured in turn.
    """
    stopped = threading.Event()
    with ExitStack() as stack:
        order = ((model_a, a), (model_b, b), (model_b, b), (model_a, a))
        contexts = [
            stack.enter_context(open_context(model, side.options())) for model, side in order
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
            slot = plan_slot(a, b, max(warm(*opened) for opened in ready))
            measures = [
                (Generation if opened[2].n_gen else Prompt)(*opened, slot) for opened in ready
            ]
            yield in_turn(measures[::2]), in_turn(measures[1::2]), tick
        except Aborted:
            raise KeyboardInterrupt from None


def in_turn(measures: Sequence[Measure]) -> Measure:
    """Return a measurement whose calls go to each of `measures` in turn."""
    turns = cycle(measures)
    return lambda: next(turns)()


def warm(context: Context, model: Model, test: Test) -> float:
    """Compute a prompt or a few tokens twice. Returns the seconds of the second prompt or of its
    last token.
    """
    passes = RandomPasses(context, model)
    work = passes.steps(0, 4) if test.n_gen else passes.prompt(0, test.n_prompt)
    run_passes(work)
    context.clear()
    *_, before, after = run_passes(work)
    context.clear()
    return (after - before) / 1e9 * (1 if test.n_gen else len(work))


def plan_slot(a: Side, b: Side, seconds: float) -> Slot:
    """Choose how many tokens to settle and to time, if the slower side takes `seconds` for one
    token (or one prompt).
    """
    alike = (
        a.loaded == b.loaded and a.test.n_threads == b.test.n_threads and a.test.n_depth <= SHORT
    )
    settling = 0 if seconds >= LONG else min(MOST_SETTLING, math.ceil(SETTLING / seconds))
    if a.test.n_prompt:
        return Slot(0 if alike else settling, 1)
    return Slot(0, 1) if alike else Slot(max(1, settling), max(1, TIMED * settling))


@contextmanager
def _reloaded(a: Side, b: Side) -> Iterator[tuple[Measure, Measure, Tick]]:
    """Yield measurements that load their side for every call and run its whole test, after its
    warm-up.
    """

    def once(side: Side) -> float:
        with open_model(side.path, gpu_layers=side.test.n_gpu_layers) as model:
            about = Subject(str(side.path), "", 0, 0)
            return measure(model, about, side.test, 1).samples_ts[0]

    yield lambda: once(a), lambda: once(b), lambda: None


def fit(a: Side, b: Side) -> bool:
    """Return whether every device can hold both sides at once, according to the memory plan; True
    if that is unknown.
    """
    needed: dict[str, int] = {}
    free: dict[str, int] = {}
    for number, side in enumerate((a, b)):
        header = read_header.read_header(side.path)
        with planner(header, side.options(), side.test.n_gpu_layers) as plan:
            shares = plan.receipt().shares
        for share in shares:
            nbytes = _bytes(share, weights=not number or a.loaded != b.loaded)
            needed[share.device] = needed.get(share.device, 0) + nbytes
            if share.available is not None:
                free[share.device] = min(share.available, free.get(share.device, share.available))
    return all(needed[device] <= available for device, available in free.items())


def _bytes(share: Share, weights: bool) -> int:
    """Return the bytes of a side's two contexts, and of its weights if the other side does not
    share them.
    """
    context_bytes = (share.kv or 0) + (share.compute or 0) + share.output
    return (
        2 * context_bytes
        + ((share.weights or 0) + (share.repacked or 0) - (share.droppable or 0)) * weights
    )
