"""KV states of a depth: sequences are filled once and then restored from the saved state, as in
llama-bench.

Computing a long prompt anew before each repetition would take longer than the measurements.
"""

from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import RandomPasses, run_passes
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.model import Model


class DepthStates:
    """The saved state of one sequence of one model at the last requested depth. It may be as large
    as the KV cache.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._state: memoryview | None = None

    def fill_sequences(self, context: Context, model: Model, test: SpeedTest) -> None:
        """Fill every sequence of an empty context with the same `test.n_depth` tokens."""
        if not test.n_depth:
            return
        key = test.n_depth, test.type_k, test.type_v, test.flash_attn, context.n_seq_max
        first = 0
        if self._of != key or self._state is None:
            self._of, self._state = key, None  # free the old state before computing the new one
            self._compute(context, model, test.n_depth, sequences=1)
            self._state, first = context.read_state(0), 1
        for sequence in range(first, test.n_parallel):
            # a state that cannot be restored is computed again
            if not context.write_state(sequence, self._state):
                self._state = None
                context.clear()
                self._compute(context, model, test.n_depth, test.n_parallel)
                return

    def _compute(self, context: Context, model: Model, count: int, sequences: int) -> None:
        run_passes(RandomPasses(context, model, sequences).prompt_passes(0, count))
