"""Decides which requests may run together if an answer must not depend on the other requests that
run.

llama.cpp fills holes in the pool of cells, and attention sums in the order of the cells
(runtime/reproducible.py). So in the reproducible mode no cells may be freed while a request runs.
Requests run in rounds: a round begins with an empty pool and admits as many requests as certainly
fit. The next round waits until all of them have ended.
"""

from collections.abc import Callable

from llmcli.batch.plans import SampleRequest
from llmcli.runtime.runner import Runner

# Takes a request and whether any request is running. Returns whether the request may start.
AdmissionRule = Callable[[SampleRequest, bool], bool]


def admission_rule(runner: Runner) -> AdmissionRule:
    """Return the admission rule for a runner. In the reproducible mode requests run in rounds. In
    other modes every request may start, because the engine itself finds cells for it.
    """
    return (
        AdmissionRounds(runner.n_ctx, runner.context.n_seq_max)
        if runner.options.reproducible
        else lambda *_: True
    )


class AdmissionRounds:
    """Admission in rounds. Counts the cells and sequences that the requests of the current round
    have reserved.
    """

    def __init__(self, cells: int, sequences: int) -> None:
        self._most = cells, sequences
        self._promised = 0, 0

    def __call__(self, sample_request: SampleRequest, is_running: bool) -> bool:
        """Return whether the request may start now. If so, reserve its cells and sequences. If
        nothing is running, the request starts a new round and is always accepted.
        """
        reserved = self._promised if is_running else (0, 0)
        request = sample_request.request
        cells = len(request.tokens) + sample_request.samples * (request.max_tokens or self._most[0])
        total = reserved[0] + cells, reserved[1] + sample_request.samples
        if is_running and (total[0] > self._most[0] or total[1] > self._most[1]):
            return False
        self._promised = total
        return True
