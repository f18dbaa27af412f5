"""Timing of settings on a loaded model. Contexts are kept between measurements as far as memory
allows.

After a change of the context or of the threads the first passes take longer, which does not occur
within an answer. So some passes are computed before the clock starts.
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
PACE = (64, 8)  # prompt and generated tokens of a speed estimate
# estimates to repeat if a prompt token and a generated token together take less than BRIEF seconds
LOOKS, BRIEF = 4, 0.1
SETTLING = 0.05  # seconds after which a change no longer matters, as in the interleaved comparison
FEW = 8  # tokens of a prompt that is only computed to settle
PART = 4  # the contexts together take at most this fraction (1 / PART) of the free memory
UNKNOWN = 2  # contexts to keep if their size is unknown


@dataclass(frozen=True, slots=True)
class Ready:
    """A warm context of one micro-batch size and mode, and its prepared passes.

    `prompts`: passes by prompt length. `steps`: passes by depth and number of tokens. `states`:
    saved KV states by depth.
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
    """The `TuningTrial` of a real model, a context manager. `longest`: the most tokens of a
    measurement.
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
        """Return the estimated seconds of a prompt token and of a generated token. For a fast
        model, return the minimum of several estimates.
        """
        estimates = [
            (self.prompt(setting, PACE[0]) / PACE[0], self.decode(setting, PACE[1]) / PACE[1])
        ]
        while len(estimates) < LOOKS and sum(estimates[0]) < BRIEF:
            estimates.append(
                (self.prompt(setting, PACE[0]) / PACE[0], self.decode(setting, PACE[1]) / PACE[1])
            )
        prompts, generated = zip(*estimates, strict=True)
        return min(prompts), min(generated)

    def prompt(self, setting: Setting, tokens: int) -> float:
        """Return the seconds of a prompt of `tokens` tokens in an empty context."""
        ready = self._context(setting)
        if tokens not in ready.prompts:
            ready.prompts[tokens] = ready.passes.prompt(0, tokens)
            # not timed: the first pass touches new memory
            self._run(ready, setting, ready.prompts[tokens])
        self._settle(ready, setting, "prompt", ready.few)
        return self._run(ready, setting, ready.prompts[tokens])

    def decode(self, setting: Setting, tokens: int, behind: int = 0) -> float:
        """Return the seconds of generating `tokens` tokens one by one after a prompt of `depth`
        tokens.
        """
        ready = self._context(setting)
        if (behind, tokens) not in ready.steps:
            ready.steps[behind, tokens] = ready.passes.steps(behind, tokens)
            self._run(ready, setting, ready.steps[behind, tokens][:1], behind)
        passes = ready.steps[behind, tokens]
        self._settle(ready, setting, "decode", passes[:1], behind)
        return self._run(ready, setting, passes, behind)

    def _settle(
        self, ready: Ready, setting: Setting, part: str, passes: Sequence[Pass], depth: int = 0
    ) -> None:
        """Compute until a change of context, phase or threads no longer matters. Does nothing if
        there was no change.
        """
        state = (id(ready), part, setting.threads, setting.threads_batch)
        start_time = time.perf_counter()
        while state != self._last and time.perf_counter() - start_time < SETTLING:
            self._run(ready, setting, passes, depth)
        self._last = state

    def _run(
        self, ready: Ready, setting: Setting, passes: Sequence[Pass], depth: int = 0
    ) -> float:
        """Return the seconds of these passes after a prompt of `depth` tokens, which is computed
        only once.
        """
        ready.context.clear()
        ready.context.set_threads(setting.threads, setting.threads_batch)
        with interruptible(ready.context):
            if depth and not (
                depth in ready.states and ready.context.write_state(0, ready.states[depth])
            ):
                run_passes(ready.passes.prompt(0, depth))
                ready.states[depth] = ready.context.read_state(0)
            stamps = run_passes(passes)
        return (stamps[-1] - stamps[0]) / 1e9

    def _context(self, setting: Setting) -> Ready:
        key = setting.ubatch, setting.flash, setting.cache
        context = self._ready.pop(key, None) or self._open(setting)
        # dictionaries keep insertion order: the most recently used context is last
        self._ready[key] = context
        while len(self._ready) > 1 and self._full():
            self._ready.pop(next(iter(self._ready))).held.close()
        return context

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
        stack = ExitStack()
        context = stack.enter_context(open_context(self.model, options))
        allocated = context.memory_breakdown()
        nbytes = allocated.context_bytes + allocated.compute_bytes if allocated else None
        passes = RandomPasses(context, self.model)
        return Ready(context, passes, passes.prompt(0, FEW), stack, nbytes, {}, {}, {})

    def _full(self) -> bool:
        sizes = [ready.nbytes for ready in self._ready.values() if ready.nbytes is not None]
        if self._room is None or len(sizes) < len(self._ready):
            return len(self._ready) > UNKNOWN
        return sum(sizes) > self._room
