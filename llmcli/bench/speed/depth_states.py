"""Saved KV states of a depth, as in llama-bench. A sequence is filled with tokens once; then others
are restored from its saved state.

Computing a long prompt before each repetition would take longer than the measurements themselves.
"""

from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import RandomPasses, run_passes
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.model import Model


class DepthStates:
    """The saved state of one sequence at the last requested depth, for one model. It may be as
    large as the KV cache.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._state: memoryview | None = None

    def fill_sequences(self, context: Context, model: Model, test: SpeedTest) -> None:
        """Fill every sequence of an empty context with the same `test.n_depth` tokens, from the
        saved state if there is one.
        """
        if not test.n_depth:
            return
        key = test.n_depth, test.type_k, test.type_v, test.flash_attn, context.n_seq_max
        first = 0
        if self._of != key or self._state is None:
            # drop the old state first, so that its memory is free
            self._of, self._state = key, None
            self._compute(context, model, test.n_depth, sequences=1)
            self._state, first = context.read_state(0), 1
        for sequence in range(first, test.n_parallel):
            # if the state cannot be restored, compute all sequences
            if not context.write_state(sequence, self._state):
                self._state = None
                context.clear()
                self._compute(context, model, test.n_depth, test.n_parallel)
                return

    def _compute(self, context: Context, model: Model, count: int, sequences: int) -> None:
        run_passes(RandomPasses(context, model, sequences).prompt_passes(0, count))
