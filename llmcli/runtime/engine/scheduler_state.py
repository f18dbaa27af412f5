"""The data that the scheduler shares with admission, prefill planning and overflow handling."""

from dataclasses import dataclass, field

from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.engine.waiting_queue import WaitingQueue, count_running
from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.sequence import Sequence

# an answer with at most this many tokens to compute (for example forced by a grammar) still counts
# as decoding
MAX_FORCED_TOKENS = 16


@dataclass(slots=True, eq=False)
class SchedulerState:
    """The limits, the running requests (by id), the waiting requests, and the number of passes so
    far.
    """

    context: BatchedMemory
    ledger: Ledger
    schedule: Schedule
    running: dict[int, Sequence] = field(default_factory=dict)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    n_passes: int = 0

    def preemption_rank(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return the sort key by which running sequences are preempted, the highest first: those
        with the lowest priority, among equals those of the client with the most running answers,
        among these the youngest.
        """
        n_running = count_running(self.running.values())[sequence.request.client]
        return -sequence.request.priority, n_running, sequence.id

    def run(self, sequence: Sequence) -> None:
        """Move a sequence from the waiting queue to the running sequences."""
        self.waiting.remove(sequence, self.n_passes)
        self.running[sequence.id] = sequence


def is_long(sequence: Sequence) -> bool:
    """Return whether a sequence has more tokens to compute than the next ones of an answer: a
    prompt, or an answer that must be recomputed.
    """
    return sequence.is_prefilling or len(sequence.tokens) - sequence.n_computed > MAX_FORCED_TOKENS
