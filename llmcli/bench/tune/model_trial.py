"""Settings measured on a model that is loaded once: contexts are kept between measurements as far
as memory allows.

After a change of context or threads the first passes take longer (threads have slept, the caches
hold other things), which no answer does that goes on with its own: some are computed before the
clock starts.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from llmcli.bench.speed.random_passes import Pass, RandomPasses, run_passes
from llmcli.bench.tune.tune import Setting
from llmcli.hardware import host
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.interruptible import interruptible

N_BATCH = 2048
PACE = (64, 8)  # tokens of a first look
LOOKS, BRIEF = (
    4,
    0.1,
)  # so many looks where a prompt's token and a generated one together take less than that
SETTLING = 0.05  # seconds after which a change is forgotten (bench/sides.py)
FEW = 8  # tokens of a prompt that is computed for nothing else
PART = 4  # contexts together take no more than this part of the memory that is free
UNKNOWN = 2  # contexts kept where their size cannot be asked


@dataclass(frozen=True, slots=True)
class Ready:
    """A context of some micro-batch and mode, warm, and what holds it open; passes by their number
    of tokens (and how many they come behind), and the states of prompts of so many tokens.
    """

    context: Context
    passes: RandomPasses
    few: Sequence[Pass]
    held: ExitStack
    nbytes: int | None
    prompts: dict[int, Sequence[Pass]]
    steps: dict[tuple[int, int], Sequence[Pass]]
    states: dict[int, memoryview]


class OnModel:
    """tune.Trial on a real model. `longest` is the most tokens a measurement will have. Use it in a
    `with`.
    """

    settling = SETTLING

    def __init__(self, model: Model, longest: int) -> None:
        self.model, self.n_ctx = model, max(longest, *PACE)
        self._ready: dict[tuple[int, str, str], Ready] = {}
        free = host.available_memory()
        self._room = free // PART if free is not None else None
        self._last: tuple[object, ...] = ()

    def __enter__(self) -> "OnModel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for ready in self._ready.values():
            ready.held.close()
        self._ready.clear()

    def pace(self, setting: Setting) -> tuple[float, float]:
        """Seconds of a prompt's token and of a generated one; of a fast model the best of a few
        looks.
        """
        looks = [(self.prompt(setting, PACE[0]) / PACE[0], self.decode(setting, PACE[1]) / PACE[1])]
        while len(looks) < LOOKS and sum(looks[0]) < BRIEF:
            looks.append(
                (self.prompt(setting, PACE[0]) / PACE[0], self.decode(setting, PACE[1]) / PACE[1])
            )
        prompts, generated = zip(*looks, strict=True)
        return min(prompts), min(generated)

    def prompt(self, setting: Setting, tokens: int) -> float:
        """Seconds of a prompt in an empty context."""
        ready = self._context(setting)
        if tokens not in ready.prompts:
            ready.prompts[tokens] = ready.passes.prompt(0, tokens)
            self._run(
                ready, setting, ready.prompts[tokens]
            )  # the first one writes to memory nobody touched yet
        self._settle(ready, setting, "prompt", ready.few)
        return self._run(ready, setting, ready.prompts[tokens])

    def decode(self, setting: Setting, tokens: int, behind: int = 0) -> float:
        """Seconds of as many tokens, one after the other, behind a prompt."""
        ready = self._context(setting)
        if (behind, tokens) not in ready.steps:
            ready.steps[behind, tokens] = ready.passes.steps(behind, tokens)
            self._run(ready, setting, ready.steps[behind, tokens][:1], behind)
        passes = ready.steps[behind, tokens]
        self._settle(ready, setting, "decode", passes[:1], behind)
        return self._run(ready, setting, passes, behind)

    def _settle(
        self, ready: Ready, setting: Setting, part: str, passes: Sequence[Pass], behind: int = 0
    ) -> None:
        """Compute until a change is forgotten; nothing where there was none."""
        now = (id(ready), part, setting.threads, setting.threads_batch)
        begun = time.perf_counter()
        while now != self._last and time.perf_counter() - begun < SETTLING:
            self._run(ready, setting, passes, behind)
        self._last = now

    def _run(
        self, ready: Ready, setting: Setting, passes: Sequence[Pass], behind: int = 0
    ) -> float:
        """Seconds of these passes behind a prompt, which is computed once."""
        ready.context.clear()
        ready.context.set_threads(setting.threads, setting.threads_batch)
        with interruptible(ready.context):
            if behind and not (
                behind in ready.states and ready.context.write_state(0, ready.states[behind])
            ):
                run_passes(ready.passes.prompt(0, behind))
                ready.states[behind] = ready.context.read_state(0)
            stamps = run_passes(passes)
        return (stamps[-1] - stamps[0]) / 1e9

    def _context(self, setting: Setting) -> Ready:
        key = setting.ubatch, setting.flash, setting.cache
        found = self._ready.pop(key, None) or self._open(setting)
        self._ready[key] = found  # the newest last
        while len(self._ready) > 1 and self._full():
            self._ready.pop(next(iter(self._ready))).held.close()
        return found

    def _open(self, setting: Setting) -> Ready:
        options = ContextOptions(
            self.n_ctx,
            N_BATCH,
            min(setting.ubatch, N_BATCH),
            1,
            setting.threads,
            setting.threads_batch,
            setting.cache,
            setting.cache,
            setting.flash,
        )
        held = ExitStack()
        context = held.enter_context(open_context(self.model, options))
        allocated = context.memory_breakdown()
        nbytes = allocated.context_bytes + allocated.compute_bytes if allocated else None
        passes = RandomPasses(context, self.model)
        return Ready(context, passes, passes.prompt(0, FEW), held, nbytes, {}, {}, {})

    def _full(self) -> bool:
        sizes = [ready.nbytes for ready in self._ready.values() if ready.nbytes is not None]
        if self._room is None or len(sizes) < len(self._ready):
            return len(self._ready) > UNKNOWN
        return sum(sizes) > self._room
