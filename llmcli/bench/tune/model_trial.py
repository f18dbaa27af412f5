"""Timing of settings on a loaded model. As long as there is enough memory, contexts stay open for
further measurements.

After a change of the context or of the number of threads, the first forward passes are slower. An
answer has no such change in the middle, so some passes are computed before the clock starts.
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
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import Model
from llmcli.runtime.interruptible_pass import interruptible

N_BATCH = 2048
# numbers of prompt tokens and of generated tokens that are timed to estimate the speed
PACE_TOKENS = (64, 8)
# If a prompt token and a generated token together take less than BRIEF_SECONDS, the speed is
# estimated this many times, and the fastest estimate is used.
MAX_ESTIMATES, BRIEF_SECONDS = 4, 0.1
SETTLING_PROMPT_TOKENS = 8  # tokens of a prompt that is computed before the clock starts
# all open contexts together take at most 1 / MEMORY_DIVISOR of the free memory
MEMORY_DIVISOR = 4
MAX_UNSIZED_CONTEXTS = 2  # maximum number of open contexts if their size is unknown


@dataclass(frozen=True, slots=True)
class WarmContext:
    """An open context for one micro-batch size, flash attention mode and cache type, with its
    prepared forward passes.

    `settling_passes`: passes that are computed before the clock starts. `prompts`: the passes of a
    prompt, by its number of tokens. `steps`: the passes of a generation, by depth and number of
    tokens. `states`: saved KV states, by depth. `nbytes`: memory of the context, None: unknown.
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
    """Measures the time of prompts and generations on a loaded model (see `TuningTrial`). It is a
    context manager that closes its contexts. `longest`: the maximum number of tokens in a
    measurement.
    """

    settling = SETTLING_SECONDS

    def __init__(self, model: Model, longest: int) -> None:
        self.model, self.n_ctx = model, max(longest, *PACE_TOKENS)
        self._contexts: dict[tuple[int, str, str], WarmContext] = {}
        free = host.available_memory()
        self._max_bytes = free // MEMORY_DIVISOR if free is not None else None
        self._last_state: tuple[object, ...] = ()

    def __enter__(self) -> "ModelTrial":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for context in self._contexts.values():
            context.exit_stack.close()
        self._contexts.clear()

    def estimate_pace(self, setting: RunSetting) -> tuple[float, float]:
        """Return the estimated seconds of a prompt token and of a generated token. For a fast
        model, take the smallest of several estimates.
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
        warm_context = self._context(setting)
        if tokens not in warm_context.prompts:
            warm_context.prompts[tokens] = warm_context.passes.prompt_passes(0, tokens)
            # not timed, because the first pass uses new memory
            self._run(warm_context, setting, warm_context.prompts[tokens])
        self._settle(warm_context, setting, "prompt", warm_context.settling_passes)
        return self._run(warm_context, setting, warm_context.prompts[tokens])

    def time_decode(self, setting: RunSetting, tokens: int, depth: int = 0) -> float:
        """Return the seconds of generating `tokens` tokens one by one after a prompt of `depth`
        tokens.
        """
        warm_context = self._context(setting)
        if (depth, tokens) not in warm_context.steps:
            warm_context.steps[depth, tokens] = warm_context.passes.token_passes(depth, tokens)
            self._run(warm_context, setting, warm_context.steps[depth, tokens][:1], depth)
        passes = warm_context.steps[depth, tokens]
        self._settle(warm_context, setting, "decode", passes[:1], depth)
        return self._run(warm_context, setting, passes, depth)

    def _settle(
        self,
        warm_context: WarmContext,
        setting: RunSetting,
        phase: str,
        passes: Sequence[PreparedPass],
        depth: int = 0,
    ) -> None:
        """After a change of context, phase or threads, compute passes until the speed is stable
        again. Without such a change, do nothing. `phase`: "prompt" or "decode".
        """
        state = (id(warm_context), phase, setting.threads, setting.threads_batch)
        start_time = time.perf_counter()
        while state != self._last_state and time.perf_counter() - start_time < SETTLING_SECONDS:
            self._run(warm_context, setting, passes, depth)
        self._last_state = state

    def _run(
        self,
        warm_context: WarmContext,
        setting: RunSetting,
        passes: Sequence[PreparedPass],
        depth: int = 0,
    ) -> float:
        """Return the seconds of these forward passes, which follow a prompt of `depth` tokens. The
        prompt is computed once and not timed; later calls restore its saved KV state.
        """
        warm_context.context.clear()
        warm_context.context.set_threads(setting.threads, setting.threads_batch)
        with interruptible(warm_context.context):
            if depth and not (
                depth in warm_context.states
                and warm_context.context.write_state(0, warm_context.states[depth])
            ):
                run_passes(warm_context.passes.prompt_passes(0, depth))
                warm_context.states[depth] = warm_context.context.read_state(0)
            stamps = run_passes(passes)
        return (stamps[-1] - stamps[0]) / 1e9

    def _context(self, setting: RunSetting) -> WarmContext:
        key = setting.ubatch, setting.flash, setting.cache
        context = self._contexts.pop(key, None) or self._open(setting)
        # the dictionary is ordered by last use, the most recently used context at the end
        self._contexts[key] = context
        while len(self._contexts) > 1 and self._is_full():
            self._contexts.pop(next(iter(self._contexts))).exit_stack.close()
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

    def _is_full(self) -> bool:
        contexts = self._contexts
        sizes = [context.nbytes for context in contexts.values() if context.nbytes is not None]
        if self._max_bytes is None or len(sizes) < len(contexts):
            return len(contexts) > MAX_UNSIZED_CONTEXTS
        return sum(sizes) > self._max_bytes
