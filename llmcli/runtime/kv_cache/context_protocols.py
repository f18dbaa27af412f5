"""The protocols that a context must fit to be managed by a ledger and a scheduler."""

from dataclasses import dataclass
from typing import Protocol


class CacheMemory(Protocol):
    """What the ledger needs of a context (llama_memory_* of llama.h).

    `has_complete_states`: a saved state contains every cell of its sequence. It is False when the
    cache keeps every cell of sliding-window layers, because llama.cpp then leaves the cells outside
    the window out of a state.
    """

    n_ctx: int
    n_seq_max: int
    n_swa: int
    is_recurrent: bool
    has_complete_states: bool

    @property
    def can_shift(self) -> bool: ...

    def trim(self, sequence: int, keep: int) -> bool: ...

    def copy(self, source: int, target: int, start: int, end: int) -> None: ...

    def shift(self, sequence: int, start: int, end: int, last: int) -> None: ...

    def first_position(self, sequence: int) -> int: ...

    def last_position(self, sequence: int) -> int: ...

    def read_state(self, sequence: int, start: int = 0) -> memoryview: ...

    def write_state(
        self, sequence: int, saved_state: bytes | memoryview, start: int = 0, source: int = -1
    ) -> bool: ...


class BatchedMemory(CacheMemory, Protocol):
    """What the scheduler needs of a context: the limits of one pass."""

    n_batch: int
    n_ubatch: int
    n_outputs: int


@dataclass(frozen=True, slots=True)
class SwappedState:
    """A state that was moved out of the pool. `tokens` are all tokens of its slot; `state` contains
    the cells of the tokens from `start` on. The cells before `start` are not in it, because another
    slot held them, too.
    """

    tokens: tuple[int, ...]
    start: int
    state: memoryview


@dataclass(frozen=True, slots=True)
class CellOwners:
    """How the cells of the pool are divided between slots.

    `latest_is_shared`: for each token of the most recently used slot, whether another slot also
    holds its cell. `other_cells`: cells that only other slots hold.
    """

    latest_is_shared: tuple[bool, ...]
    other_cells: int
    free_cells: int
