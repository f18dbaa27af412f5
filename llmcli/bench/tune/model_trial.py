"""Timing of settings on a loaded model. Contexts stay open for further measurements, as far as
memory allows.

After a change of the context or of the number of threads, the first passes take longer. This does
not happen within an answer, so some passes are computed before the clock starts.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from llmcli.bench.speed.measure import build_context_options
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import (
    SETTLING_SECONDS,
    PreparedPass,
    RandomPasses,
    run_passes,
)
from llmcli.bench.tune.tune import RunSetting
from llmcli.hardware import host
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.interruptible_pass import interruptible

N_BATCH = 2048
# numbers of prompt tokens and of generated tokens that are timed to estimate the speed
PACE_TOKENS = (64, 8)
# Number of estimates, of which the fastest counts, if a prompt token and a generated token together
# take less than BRIEF_SECONDS.
MAX_ESTIMATES, BRIEF_SECONDS = 4, 0.1
SETTLING_PROMPT_TOKENS = 8  # tokens of a prompt that is computed before the clock starts
# all open contexts together take at most this part of the free memory: 1 / MEMORY_DIVISOR
MEMORY_DIVISOR = 4
MAX_UNSIZED_CONTEXTS = 2  # maximum number of open contexts if their size is unknown


@dataclass(frozen=True, slots=True)
class WarmContext:
    """An open context for one micro-batch size and mode, with its prepared passes.

    `prompts`: the passes of a prompt, by its number of tokens. `steps`: the passes of a generation,
    by depth and number of tokens. `states`: saved KV states, by depth.
    """

    context: Context
    passes: RandomPasses
    settling_passes: Sequence[PreparedPass]
    exit_stack: ExitStack
    nbytes: int | None
    prompts: dict[int, Sequence[PreparedPass]]
    steps: dict[tuple[int, int], Sequence[PreparedPass]]
    states: dict[int, memoryview]


class ModelTrial:
    """A `TuningTrial` with a real model, to be used as a context manager. `longest`: the maximum
    number of tokens in a measurement.
    """

    settling = SETTLING_SECONDS

    def __init__(self, model: Model, longest: int) -> None:
        self.model, self.n_ctx = model, max(longest, *PACE_TOKENS)
        self._ready: dict[tuple[int, str, str], WarmContext] = {}
        free = host.available_memory()
        self._room = free // MEMORY_DIVISOR if free is not None else None
        self._last: tuple[object, ...] = ()

    def __enter__(self) -> "ModelTrial":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for ready in self._ready.values():
            ready.exit_stack.close()
        self._ready.clear()

    def estimate_pace(self, setting: RunSetting) -> tuple[float, float]:
        """Return the estimated seconds of a prompt token and of a generated token. For a fast
        model, make several estimates and return the smallest.
        """
        estimates = [
            (
                self.time_prompt(setting, PACE_TOKENS[0]) / PACE_TOKENS[0],
                self.time_decode(setting, PACE_TOKENS[1]) / PACE_TOKENS[1],
            )
        ]
        while len(estimates) < MAX_ESTIMATES and sum(estimates[0]) < BRIEF_SECONDS:
            estimates.append(
                (
                    self.time_prompt(setting, PACE_TOKENS[0]) / PACE_TOKENS[0],
                    self.time_decode(setting, PACE_TOKENS[1]) / PACE_TOKENS[1],
                )
            )
        prompts, generated = zip(*estimates, strict=True)
        return min(prompts), min(generated)

    def time_prompt(self, setting: RunSetting, tokens: int) -> float:
        """Return the seconds of a prompt of `tokens` tokens in an empty context."""
        ready = self._context(setting)
        if tokens not in ready.prompts:
            ready.prompts[tokens] = ready.passes.prompt_passes(0, tokens)
            # not timed, because the first pass uses new memory
            self._run(ready, setting, ready.prompts[tokens])
        self._settle(ready, setting, "prompt", ready.settling_passes)
        return self._run(ready, setting, ready.prompts[tokens])

    def time_decode(self, setting: RunSetting, tokens: int, depth: int = 0) -> float:
        """Return the seconds of generating `tokens` tokens one by one after a prompt of `depth`
        tokens.
        """
        ready = self._context(setting)
        if (depth, tokens) not in ready.steps:
            ready.steps[depth, tokens] = ready.passes.token_passes(depth, tokens)
            self._run(ready, setting, ready.steps[depth, tokens][:1], depth)
        passes = ready.steps[depth, tokens]
        self._settle(ready, setting, "decode", passes[:1], depth)
        return self._run(ready, setting, passes, depth)

    def _settle(
        self,
        ready: WarmContext,
        setting: RunSetting,
        part: str,
        passes: Sequence[PreparedPass],
        depth: int = 0,
    ) -> None:
        """Compute passes until the speed is stable again after a change of context, phase or
        threads. Without such a change, do nothing.
        """
        state = (id(ready), part, setting.threads, setting.threads_batch)
        start_time = time.perf_counter()
        while state != self._last and time.perf_counter() - start_time < SETTLING_SECONDS:
            self._run(ready, setting, passes, depth)
        self._last = state

    def _run(
        self,
        ready: WarmContext,
        setting: RunSetting,
        passes: Sequence[PreparedPass],
        depth: int = 0,
    ) -> float:
        """Return the seconds of these passes, which follow a prompt of `depth` tokens. This prompt
        is computed only once; then its saved state is used.
        """
        ready.context.clear()
        ready.context.set_threads(setting.threads, setting.threads_batch)
        with interruptible(ready.context):
            if depth and not (
                depth in ready.states and ready.context.write_state(0, ready.states[depth])
            ):
                run_passes(ready.passes.prompt_passes(0, depth))
                ready.states[depth] = ready.context.read_state(0)
            stamps = run_passes(passes)
        return (stamps[-1] - stamps[0]) / 1e9

    def _context(self, setting: RunSetting) -> WarmContext:
        key = setting.ubatch, setting.flash, setting.cache
        context = self._ready.pop(key, None) or self._open(setting)
        # move this context to the end of the dictionary, since the last one is the most recently
        # used
        self._ready[key] = context
        while len(self._ready) > 1 and self._full():
            self._ready.pop(next(iter(self._ready))).exit_stack.close()
        return context

    def _open(self, setting: RunSetting) -> WarmContext:
        test = SpeedTest(
            n_prompt=0,
            n_gen=0,
            n_depth=0,
            n_batch=N_BATCH,
            n_ubatch=setting.ubatch,
            type_k=setting.cache,
            type_v=setting.cache,
            n_threads=setting.threads,
            n_gpu_layers=-1,  # has no effect, because the model is loaded already
            flash_attn=setting.flash,
        )
        options = replace(
            build_context_options(test, self.n_ctx), n_threads_batch=setting.threads_batch
        )
        stack = ExitStack()
        context = stack.enter_context(open_context(self.model, options))
        allocated = context.memory_breakdown()
        nbytes = allocated.context_bytes + allocated.compute_bytes if allocated else None
        passes = RandomPasses(context, self.model)
        return WarmContext(
            context,
            passes,
            passes.prompt_passes(0, SETTLING_PROMPT_TOKENS),
            stack,
            nbytes,
            {},
            {},
            {},
        )

    def _full(self) -> bool:
        sizes = [ready.nbytes for ready in self._ready.values() if ready.nbytes is not None]
        if self._room is None or len(sizes) < len(self._ready):
            return len(self._ready) > MAX_UNSIZED_CONTEXTS
        return sum(sizes) > self._room
