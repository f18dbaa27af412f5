"""Sequences brought to a depth: computed once, then put back from their saved state, as llama-bench
does.

Computing 8192 tokens anew before each of five repetitions of 128 takes longer than all that is
measured.
"""

from llmcli.bench.grid import Test
from llmcli.bench.passes import RandomPasses, run_passes
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.model import Model


class Depths:
    """The state of one sequence of one model at the depth asked for last; it may be as large as the
    KV cache.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._state: memoryview | None = None

    def bring(self, context: Context, model: Model, test: Test) -> None:
        """Let every sequence of an empty context hold `test.n_depth` tokens: the same ones, in
        cells of its own.
        """
        if not test.n_depth:
            return
        of = test.n_depth, test.type_k, test.type_v, test.flash_attn, context.n_seq_max
        first = 0
        if self._of != of or self._state is None:
            self._of, self._state = of, None  # the old one goes before the new one comes
            self._compute(context, model, test.n_depth, sequences=1)
            self._state, first = context.state(0), 1
        for sequence in range(first, test.n_parallel):
            if not context.put_state(
                sequence, self._state
            ):  # kept otherwise than it was: compute it
                self._state = None
                context.clear()
                self._compute(context, model, test.n_depth, test.n_parallel)
                return

    def _compute(self, context: Context, model: Model, count: int, sequences: int) -> None:
        run_passes(RandomPasses(context, model, sequences).prompt(0, count))
