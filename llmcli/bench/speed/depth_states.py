"""Saved KV states for tests with a depth, as in llama-bench. The tokens of the depth are computed
for one sequence. The KV state of this sequence is saved, and all further sequences and repetitions
restore it.

Without this, computing a long prompt before each repetition would take longer than the measurement
itself.
"""

from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import RandomPasses, run_passes
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.model import Model


class DepthStates:
    """Keeps the KV state of one sequence at the last requested depth of one model. The state may be
    as large as the KV cache.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._state: memoryview | None = None

    def fill_sequences(self, context: Context, model: Model, test: SpeedTest) -> None:
        """Fill each sequence of an empty context with the same `test.n_depth` tokens. Restore the
        saved state if its depth and settings match; otherwise compute the tokens and save the
        state.
        """
        if not test.n_depth:
            return
        key = test.n_depth, test.type_k, test.type_v, test.flash_attn, context.n_seq_max
        first = 0
        if self._key != key or self._state is None:
            # drop the old state first, so that its memory is free
            self._key, self._state = key, None
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
