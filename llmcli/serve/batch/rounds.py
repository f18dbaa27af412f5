"""Which requests may begin beside those that run, where the bits of an answer must not depend on
its company.

llama.cpp fills holes in the pool of cells, and attention adds up in the order of cells
(runtime/reproducible.py). So in the reproducible mode nothing is freed while anything runs: a round
begins in an empty pool, takes in as much as surely fits, and the next one waits until it is over.

2026-11-22: 16 at once without rounds gave other texts than 4 at once for a third of 35 prompts;
with an engine that lays the cells out anew when room is short, still for one of 24 (two samples of
one prompt, 12 at once against 3). With rounds for none. That one had a cause of its own, since
mended (a sample that had given way was taken for one that had not begun; slots that were cut left
holes): then 0 of 24 at 3, 5 and 12 at once without rounds, too. They stay: nothing is computed
twice in them.
"""

from collections.abc import Callable

from llmcli.runtime.runner import Runner
from llmcli.serve.batch.plans import Wanted

Admit = Callable[
    [Wanted, bool], bool
]  # a request, and whether anything runs -> whether it may begin


def admission(runner: Runner) -> Admit:
    """The rule that this runner asks for; the engine itself finds room where none is needed."""
    return (
        Rounds(runner.n_ctx, runner.context.n_seq_max)
        if runner.options.reproducible
        else lambda *_: True
    )


class Rounds:
    """Counts the cells and sequences that a round has promised."""

    def __init__(self, cells: int, sequences: int) -> None:
        self._most = cells, sequences
        self._promised = 0, 0

    def __call__(self, wanted: Wanted, running: bool) -> bool:
        """Whether it may begin now; then it counts. Alone it always may."""
        before = self._promised if running else (0, 0)
        request = wanted.request
        cells = len(request.tokens) + wanted.samples * (request.max_tokens or self._most[0])
        now = before[0] + cells, before[1] + wanted.samples
        if running and (now[0] > self._most[0] or now[1] > self._most[1]):
            return False
        self._promised = now
        return True
