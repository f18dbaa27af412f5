"""Decides which requests may start together if an answer must not depend on the others that run.

llama.cpp fills holes in the pool of cells, and attention sums in the order of cells
(runtime/reproducible.py). So in the reproducible mode no cells are freed while anything runs: a
round begins with an empty pool, admits as many requests as certainly fit, and the next round waits
until it has ended.
"""

from collections.abc import Callable

from llmcli.batch.plans import SampleRequest
from llmcli.runtime.runner import Runner

# A request, and whether anything runs -> whether the request may start.
AdmissionRule = Callable[[SampleRequest, bool], bool]


def admission_rule(runner: Runner) -> AdmissionRule:
    """Return the rule for this runner. Outside the reproducible mode every request may start,
    because the engine itself finds room.
    """
    return (
        AdmissionRounds(runner.n_ctx, runner.context.n_seq_max)
        if runner.options.reproducible
        else lambda *_: True
    )


class AdmissionRounds:
    """Counts the cells and sequences that the requests of a round have reserved."""

    def __init__(self, cells: int, sequences: int) -> None:
        self._most = cells, sequences
        self._promised = 0, 0

    def __call__(self, sample_request: SampleRequest, is_running: bool) -> bool:
        """Return whether the request may start now, and reserve its cells if so. A request may
        always start when nothing else runs.
        """
        reserved = self._promised if is_running else (0, 0)
        request = sample_request.request
        cells = len(request.tokens) + sample_request.samples * (request.max_tokens or self._most[0])
        total = reserved[0] + cells, reserved[1] + sample_request.samples
        if is_running and (total[0] > self._most[0] or total[1] > self._most[1]):
            return False
        self._promised = total
        return True
