"""Decides when a request of a batch may start, so that in the reproducible mode its answer does not
depend on the requests that run beside it.

llama.cpp reuses freed KV cache cells, and attention sums in the order of the cells. So which cells
a request gets can change the rounding of its logits (runtime/reproducible.py). Therefore no cell
may be freed while a request runs. Requests run in rounds: a round begins with an empty KV cache and
admits requests while their maximum number of cells fits into it. The next round begins when all
requests of the round have ended.
"""

from collections.abc import Callable

from llmcli.batch.plans import SampleRequest
from llmcli.runtime.runner import Runner

# Function of a request and whether any request is running. Returns whether the request may start.
AdmissionRule = Callable[[SampleRequest, bool], bool]


def admission_rule(runner: Runner) -> AdmissionRule:
    """Return the rule for a runner. In the reproducible mode requests run in rounds. Otherwise
    every request may start at any time, because the engine itself waits for free cells.
    """
    return (
        AdmissionRounds(runner.n_ctx, runner.context.n_seq_max)
        if runner.options.reproducible
        else lambda *_: True
    )


class AdmissionRounds:
    """An AdmissionRule that lets requests run in rounds. It counts the KV cache cells and the
    sequences that the requests of the current round may use at most.

    `cells`, `sequences`: how many the context has.
    """

    def __init__(self, cells: int, sequences: int) -> None:
        self._capacity = cells, sequences
        self._reserved = 0, 0

    def __call__(self, sample_request: SampleRequest, is_running: bool) -> bool:
        """Return whether the request may start now, and reserve its cells and sequences if it may.
        `is_running`: whether any request is running. If none is, the request starts a new round and
        is always accepted.
        """
        reserved = self._reserved if is_running else (0, 0)
        request = sample_request.request
        max_tokens = request.max_tokens or self._capacity[0]
        cells = len(request.tokens) + sample_request.samples * max_tokens
        total = reserved[0] + cells, reserved[1] + sample_request.samples
        if is_running and (total[0] > self._capacity[0] or total[1] > self._capacity[1]):
            return False
        self._reserved = total
        return True
