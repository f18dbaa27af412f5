"""The parts of a context that the ledger and the scheduler use, as protocols. Tests replace the
context by a fake.
"""

from dataclasses import dataclass
from typing import Protocol

from llmcli.runtime.kv_cache.checkpoints import Checkpoint


class CacheMemory(Protocol):
    """The methods and sizes of a context that the ledger uses. They are described in
    binding/contexts/context.py.

    `n_rs_seq`: by how many tokens of the last pass recurrent state can go back.

    `has_complete_states`: whether a saved state contains every cell of its sequence. It is False
    when layers with a sliding window keep all their cells, because llama.cpp leaves cells outside
    the window out of a state.
    """

    n_ctx: int
    n_seq_max: int
    n_swa: int
    is_recurrent: bool
    n_rs_seq: int
    has_complete_states: bool

    @property
    def can_shift(self) -> bool: ...

    def keep_branch(self, sequence: int, branch: int, start: int, end: int) -> None: ...

    def drop_branches(self) -> None: ...

    @property
    def needs_checkpoints(self) -> bool: ...

    def checkpoint_size(self, sequence: int) -> int: ...

    def read_checkpoint(self, sequence: int) -> memoryview: ...

    def restore_checkpoint(
        self, sequence: int, checkpoint: memoryview, length: int, source: int | None = None
    ) -> bool: ...

    def trim(self, sequence: int, keep: int) -> bool: ...

    def copy(self, source: int, target: int, start: int, end: int) -> None: ...

    def shift(self, sequence: int, start: int, end: int, last: int) -> None: ...

    def first_position(self, sequence: int) -> int: ...

    def last_position(self, sequence: int) -> int: ...

    def read_state(self, sequence: int, start: int = 0) -> memoryview: ...

    @property
    def spare_sequence(self) -> int | None: ...

    def read_range(self, sequence: int, start: int, end: int, spare: int | None) -> memoryview: ...

    def write_state(
        self, sequence: int, saved_state: bytes | memoryview, start: int = 0, source: int = -1
    ) -> bool: ...


class BatchedMemory(CacheMemory, Protocol):
    """A CacheMemory with the limits of one forward pass: rows of a batch, rows of a micro-batch,
    rows whose logits are computed, and branches of a tree of tokens. The scheduler plans passes
    within them.
    """

    n_batch: int
    n_ubatch: int
    n_outputs: int
    max_branches: int


@dataclass(frozen=True, slots=True)
class SwappedState:
    """The state of a slot, moved to host memory. `tokens`: all tokens of the slot. `state`: the
    cells of the tokens from `start` on. The earlier cells are left out, because another slot also
    used them, so they stayed in the pool. `checkpoints`: those of the slot.
    """

    tokens: tuple[int, ...]
    start: int
    state: memoryview
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def n_cells(self) -> int:
        """Return the number of cells in the state."""
        return len(self.tokens) - self.start


@dataclass(frozen=True, slots=True)
class CellOwners:
    """How the cells of the pool are divided between slots.

    - `latest_is_shared`: for each token of the most recently used slot, whether another slot also
      uses its cell.
    - `other_cells`: number of cells that only other slots use.
    - `free_cells`: number of cells that no slot uses.
    """

    latest_is_shared: tuple[bool, ...]
    other_cells: int
    free_cells: int
