"""Two things to be compared, open at once and measured in turn, a few tokens each.

What a switch costs is not measured: after another model's weights have been through the caches, or
another number of threads has slept, the first tokens take up to a fifth longer. Sides that are
alike share weights and threads; they change after every token, so that the machine's moods meet
both.
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

SETTLING = 0.05  # seconds after which a switch is forgotten
MOST_SETTLING = 16  # tokens, or prompts
TIMED = 2  # times as many tokens as settle
SHORT = 512  # a cache of so many tokens is small beside the weights
LONG = 10 * SETTLING  # what takes as long has no use for settling

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two: a file, and a test with its settings. Both have the same prompt, tokens and
    depth.
    """

    path: Path
    test: Test

    @property
    def loaded(self) -> tuple[Path, int]:
        """What two sides must agree in to share their weights."""
        return self.path, self.test.n_gpu_layers

    def options(self) -> ContextOptions:
        """The context it is measured in."""
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
    """How one measurement goes: so many tokens (or prompts) that do not count, then so many that
    are timed.
    """

    settling: int
    timed: int


class Generation:
    """tg: every call gives the speed of the next few tokens; after the last one it begins anew
    behind its depth.
    """

    def __init__(self, context: Context, model: Model, test: Test, slot: Slot) -> None:
        self.context, self.depth, self.slot = context, test.n_depth, slot
        passes, length = RandomPasses(context, model), slot.settling + slot.timed
        self.before = passes.prompt(0, test.n_depth)
        self.steps = passes.steps(test.n_depth, math.ceil(test.n_gen / length) * length)
        self.at = 0
        rewind(context, 0, self.before)

    def __call__(self) -> float:
        """Tokens per second."""
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
    """pp: every call gives the speed of one prompt."""

    def __init__(self, context: Context, model: Model, test: Test, slot: Slot) -> None:
        self.context, self.test, self.slot = context, test, slot
        passes = RandomPasses(context, model)
        self.before = passes.prompt(0, test.n_depth)
        self.steps = passes.prompt(test.n_depth, test.n_prompt)
        rewind(context, 0, self.before)

    def __call__(self) -> float:
        """Tokens per second."""
        for _ in range(self.slot.settling):
            self._nanoseconds()
        return self.test.n_prompt * 1e9 / self._nanoseconds()

    def _nanoseconds(self) -> int:
        rewind(self.context, self.test.n_depth, self.before)
        began, *_, ended = run_passes(self.steps)
        return ended - began


def rewind(context: Context, depth: int, before: Sequence[Callable[[], None]]) -> None:
    """Go back to where a context holds what `before` computes: a cut where its memory can, else
    anew.
    """
    if not (depth and context.trim(0, depth)):
        context.clear()
        run_passes(before)


def run(
    pairs: Sequence[tuple[Side, Side]], design: Design, watcher: Watcher, apart: bool | None = None
) -> list[Comparison]:
    """Compare two sides in each of some tests; the doubt that `design` allows is for all of them
    together.

    `apart`: never both at once; None: where they do not fit the memory. Raises UserError for what
    llama.cpp refuses, Refusal for a damaged file, KeyboardInterrupt at Ctrl-C.
    """
    for side in {side.path: side for pair in pairs for side in pair}.values():
        load_checks.check_loadable(read_header.read_header(side.path))
    for pair in pairs:
        for side in pair:
            kv_size.check_cache(
                read_header.read_header(side.path).metadata, side.test.type_k, side.test.type_v
            )
    each = replace(design, confidence=1 - (1 - design.confidence) / len(pairs))
    if apart is None:
        apart = not all(fit(*pair) for pair in pairs)
    if apart:
        watcher.note(
            f"both do not fit the memory at once: each is loaded {each.least} times in turn"
        )
    found = []
    with watcher.bar("compare", len(pairs), "tests") as bar, ExitStack() as stack:
        models = {} if apart else _models(pairs, stack)
        for a, b in pairs:
            bar.describe(f"compare {a.test.name}")
            with (
                _reloaded(a, b)
                if apart
                else together(models[a.loaded], models[b.loaded], a, b) as (one, other, tick)
            ):
                found.append(paired_test.compare(one, other, each, tick=tick))
            bar.advance(1)
    return found


def _models(pairs: Sequence[tuple[Side, Side]], stack: ExitStack) -> dict[tuple[Path, int], Model]:
    stack.enter_context(gemm.enabled(gemm.MIN_PROMPT_ROWS))
    wanted = dict.fromkeys(side.loaded for pair in pairs for side in pair)
    return {key: stack.enter_context(open_model(key[0], gpu_layers=key[1])) for key in wanted}


@contextmanager
def together(one: Model, other: Model, a: Side, b: Side) -> Iterator[tuple[Measure, Measure, Tick]]:
    """Both sides warm, in contexts that are open at once. Ctrl-C ends the running pass; one that
    comes just after it is KeyboardInterrupt where the third is called, between pairs.

    A context that is opened later lies elsewhere in memory: of two that are alike the second was
    0.5 % slower in each of 20 runs (SmolLM2 135M). So each side has two, opened in the order A B B
    A, and its calls go to them in turn.
    """
    stopped = threading.Event()
    with ExitStack() as stack:
        order = ((one, a), (other, b), (other, b), (one, a))
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
            slot = plan_slot(a, b, max(warm(*each) for each in ready))
            made = [(Generation if each[2].n_gen else Prompt)(*each, slot) for each in ready]
            yield in_turn(made[::2]), in_turn(made[1::2]), tick
        except Aborted:
            raise KeyboardInterrupt from None


def in_turn(measures: Sequence[Measure]) -> Measure:
    """Each call is one of these, the next time the next one."""
    turns = cycle(measures)
    return lambda: next(turns)()


def warm(context: Context, model: Model, test: Test) -> float:
    """Compute a prompt, or a few tokens; the seconds of the last prompt or token."""
    passes = RandomPasses(context, model)
    work = passes.steps(0, 4) if test.n_gen else passes.prompt(0, test.n_prompt)
    run_passes(work)
    context.clear()
    *_, before, after = run_passes(work)
    context.clear()
    return (after - before) / 1e9 * (1 if test.n_gen else len(work))


def plan_slot(a: Side, b: Side, seconds: float) -> Slot:
    """How many tokens settle and are timed where the slower side takes so many seconds for one (or
    for its prompt).
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
    """Sides that are loaded anew each time they are measured: their whole test, after its warm-up."""

    def once(side: Side) -> float:
        with open_model(side.path, gpu_layers=side.test.n_gpu_layers) as model:
            about = Subject(str(side.path), "", 0, 0)
            return measure(model, about, side.test, 1).samples_ts[0]

    yield lambda: once(a), lambda: once(b), lambda: None


def fit(a: Side, b: Side) -> bool:
    """Whether every device holds both at once, by `llmcli plan`'s figures; True where they cannot
    be known.
    """
    needed: dict[str, int] = {}
    free: dict[str, int] = {}
    for number, side in enumerate((a, b)):
        header = read_header.read_header(side.path)
        with planner(header, side.options(), side.test.n_gpu_layers) as plan:
            shares = plan.receipt().shares
        for share in shares:
            held = _bytes(share, weights=not number or a.loaded != b.loaded)
            needed[share.device] = needed.get(share.device, 0) + held
            if share.available is not None:
                free[share.device] = min(share.available, free.get(share.device, share.available))
    return all(needed[device] <= room for device, room in free.items())


def _bytes(share: Share, weights: bool) -> int:
    """What a side's two contexts take, and its weights unless the other's are the same."""
    own = (share.kv or 0) + (share.compute or 0) + share.output
    return (
        2 * own + ((share.weights or 0) + (share.repacked or 0) - (share.droppable or 0)) * weights
    )
