"""What a ledger asks of a memory, and what it tells of one."""

from dataclasses import dataclass
from typing import Protocol


class Memory(Protocol):
    """What the ledger asks of a context (llama_memory_* of llama.h). `whole_states`: a state has
    every cell; llama.cpp leaves out of one what a window does not see any more, though all of it
    was kept.
    """

    n_ctx: int
    n_seq_max: int
    n_swa: int
    recurrent: bool
    whole_states: bool

    @property
    def can_shift(self) -> bool: ...

    def trim(self, sequence: int, keep: int) -> bool: ...

    def copy(self, source: int, target: int, start: int, end: int) -> None: ...

    def shift(self, sequence: int, start: int, end: int, last: int) -> None: ...

    def first(self, sequence: int) -> int: ...

    def last(self, sequence: int) -> int: ...

    def state(self, sequence: int, start: int = 0) -> memoryview: ...

    def put_state(
        self, sequence: int, kept: bytes | memoryview, start: int = 0, source: int = -1
    ) -> bool: ...


class Pool(Memory, Protocol):
    """What a scheduler asks of a context: how much a pass may hold."""

    n_batch: int
    n_ubatch: int
    n_outputs: int


@dataclass(frozen=True, slots=True)
class Away:
    """What a slot held, outside the pool: its tokens, and the state of those from `start` on;
    others held the rest.
    """

    tokens: tuple[int, ...]
    start: int
    state: memoryview


@dataclass(frozen=True, slots=True)
class Occupied:
    """Whose cells are where. `latest`: for each token of the slot used last, whether others hold
    its cell as well; `others`: cells that this slot does not hold.
    """

    latest: tuple[bool, ...]
    others: int
    free: int
