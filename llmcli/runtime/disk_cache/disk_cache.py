"""The prefix cache on disk: states of finished answers outlive the process, and are found by the
hashes of their tokens (token_hashes.py).

- When an answer ends, its slot is noted. Its cells are then copied in parts of at most PART_TOKENS
  tokens, one part between two passes while others run, and all when the engine is idle. A thread
  writes them (state_writer.py). What is on the disk already, also of other slots and processes, is
  not written again, so a turn of a conversation adds its new tokens only.
- Recurrent state, and cells of a sliding window, belong to the end of a text. These states are
  written as a whole, with the latest checkpoints. If copying one takes longer than MAX_COPY_SECONDS
  by what was measured, it waits until the engine is idle, or its slot is about to lose its cells.
- A prompt whose beginning is not in memory waits while a thread reads it (state_loader.py), unless
  computing it takes less time by what was measured. Other answers run meanwhile.

The methods are called on the engine's thread. The bytes that wait to be written, or are being read,
count in the budget of host memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcli.runtime.binding.kv_state.state_ranges import ForeignLayout, check_range
from llmcli.runtime.disk_cache.entry import MAX_ENDS, Entry
from llmcli.runtime.disk_cache.entry_index import EntryIndex
from llmcli.runtime.disk_cache.folder import StateFolder
from llmcli.runtime.disk_cache.state_loader import MIN_LOADED_TOKENS, StateLoad, StateLoader
from llmcli.runtime.disk_cache.state_writer import StateWriter, WriteJob
from llmcli.runtime.disk_cache.token_hashes import BLOCK_TOKENS, HashChain
from llmcli.runtime.kv_cache.offload_cost import StateCost, is_worth_restoring
from llmcli.runtime.kv_cache.offload_store import OffloadStore, moving_average

PART_TOKENS = 256
MAX_QUEUED_BYTES = 256 << 20
MAX_SAVED_CHECKPOINTS = 2
MAX_COPY_SECONDS = 0.05  # how long a copy may delay the tokens of running answers
WAIT_SECONDS = 0.01  # between two looks at the queue while the cache closes


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """What the cache has done since it was opened, and what is in its folder.

    - `entries`: files of this model. `used_bytes`: of all models. `max_bytes`: the quota.
    - `queued_bytes`: states in memory that are not yet written, with the expected bytes of those
      that are still in their slots.
    - `read_tokens`: tokens that were not computed because of the cache. `read_bytes`,
      `written_bytes`: of states.
    - `dropped`: files that this process dropped for others. `damaged`: files that could not be
      used. `failed`: states that could not be written.
    - `bugs`: unexpected exceptions. `is_writing`: False after one of the writer, and for a short
      time after an error of the folder.
    """

    entries: int
    used_bytes: int
    max_bytes: int
    queued_bytes: int
    read_tokens: int
    read_bytes: int
    written_bytes: int
    dropped: int
    damaged: int
    failed: int
    bugs: int
    is_writing: bool


class DiskCache:
    """The states of one engine on disk. `store`: its states in host memory. `report`: called with a
    line for the log, on any thread. `by_channel`: in which order the context probably stores its
    values (V); the first state that is read from it shows it.
    """

    def __init__(
        self,
        folder: StateFolder,
        store: OffloadStore,
        n_vocab: int,
        report: Callable[[str], None],
        by_channel: bool = False,
    ) -> None:
        self.folder, self.store, self.ledger = folder, store, store.ledger
        self.is_ranged = self.ledger.can_fork
        self.index = EntryIndex(folder, self._report_damage)
        self.writer = StateWriter(folder, self._end_write, report)
        self.loader = StateLoader(
            self.index, n_vocab, self._is_worth_reading, self._record_read, by_channel
        )
        # Called on the writer's thread when the queue has room again for a state that waits.
        self.on_room: Callable[[], None] = lambda: None
        self._pending: dict[int, None] = {}  # slots of finished answers, the first ended first
        self._queued: set[bytes] = set()  # hashes of the texts whose states are in the queue
        self._chains: dict[int, HashChain] = {}  # by slot
        self._is_checked = self._lacks_room = False
        self._byte_seconds = 0.0  # of reading and checking an entry; 0: not measured
        self._read_tokens = self._read_bytes = self._n_damaged = 0
        store.other_bytes = self.queued_bytes

    def queued_bytes(self) -> int:
        """Return the bytes of states in memory that wait to be written, or are being read."""
        return self.writer.nbytes + self.loader.nbytes

    @property
    def usage(self) -> DiskUsage:
        """Return the present use of the cache."""
        return DiskUsage(
            len(self.index),
            self.folder.used_bytes,
            self.folder.max_bytes,
            self.writer.nbytes + round(self._pending_bytes()),
            self._read_tokens,
            self._read_bytes,
            self.writer.written_bytes,
            self.folder.n_dropped,
            self._n_damaged,
            self.writer.n_failed,
            self.writer.n_bugs,
            not self.writer.is_paused,
        )

    # Saving

    def note_end(self, slot: int) -> None:
        """Note that an answer has ended, whose slot is now idle."""
        self._pending.pop(slot, None)
        self._pending[slot] = None

    @property
    def has_pending(self) -> bool:
        """Return whether states of finished answers are still to be copied."""
        return bool(self._pending)

    def save_part(self, is_idle: bool) -> bool:
        """Copy the next part of a state to the queue of the writer. `is_idle`: no answers run, which
        would wait for a long copy. Return False if nothing can be copied now.
        """
        slot = next((slot for slot in self._pending if is_idle or self._is_short(slot)), None)
        if slot is None or self._lacks_room:
            return False
        if not self._save_part(slot) and not self._lacks_room:
            del self._pending[slot]
        return True

    def _is_short(self, slot: int) -> bool:
        """Return whether copying the next part of a slot takes a short time."""
        if self.is_ranged and self._spare_sequence() is not None:
            return True
        nbytes = self.store.estimate_bytes(len(self.ledger.tokens[slot]))
        return nbytes * self.store.costs.byte_seconds <= MAX_COPY_SECONDS

    def _pending_bytes(self) -> float:
        """Return the expected bytes of the states that are not yet copied."""
        return sum(
            self.store.estimate_bytes(len(self.ledger.tokens[slot])) for slot in self._pending
        )

    def save_slot(self, slot: int) -> None:
        """Copy to the queue what is still missing of a slot that is about to lose its cells, as far
        as there is room.
        """
        if slot in self._pending:
            while self._save_part(slot):
                pass
            del self._pending[slot]

    def _save_part(self, slot: int) -> bool:
        """Queue the next part of a slot. Return False if all of it is saved or queued, or there is
        no room for it in the queue (`_lacks_room`).
        """
        self._lacks_room = False
        tokens = self.ledger.tokens[slot]
        if self.writer.is_paused or not self.ledger.memory.has_complete_states:
            return False
        chain = self._chain(slot)
        hashes = chain.blocks(tokens)
        if self.is_ranged:
            return self._save_cells(slot, tokens, hashes)
        # a busy slot is noted again at its end
        if len(tokens) >= MIN_LOADED_TOKENS and not self.ledger.is_busy(slot):
            self._save_whole(slot, tokens, chain)
        return False

    def _chain(self, slot: int) -> HashChain:
        """Return the hashes of a slot's text."""
        found, fresh = self._chains.get(slot), HashChain(self.folder.digest, self._scope(slot))
        if found is None or found.root != fresh.root:
            found = self._chains[slot] = fresh
        return found

    def _scope(self, slot: int) -> str:
        return self.ledger.scopes[slot]

    def _save_cells(self, slot: int, tokens: list[int], hashes: list[bytes]) -> bool:
        """Queue the first blocks of a slot that are missing on the disk. Return False if none is."""
        missing = self.index.find_missing(hashes, self._queued)
        if not missing:
            if names := self.index.names_of(hashes):
                self.writer.touch(names)
            return False
        memory, spare = self.ledger.memory, self._spare_sequence()
        # without a spare sequence, all of the slot is read for a part of it
        missing = missing[: MAX_ENDS if spare is None else PART_TOKENS // BLOCK_TOKENS]
        start, end = BLOCK_TOKENS * missing.start, BLOCK_TOKENS * missing.stop
        nbytes = self.store.estimate_bytes(end - start)
        if not self._is_worth_reading(end - start, round(nbytes)) or not self._has_room(nbytes):
            return False
        try:
            state = memory.read_range(slot, start, end, spare)
            if not self._is_checked:
                self.loader.by_channel = check_range(state, start, end)
                self._is_checked = True
        except MemoryError:
            return False
        except ForeignLayout:  # this build stores cells in another format
            self.is_ranged = False
            return True
        ends = tuple((BLOCK_TOKENS * (at + 1), hashes[at]) for at in missing)
        self._put(Entry("cells", start, ends, len(state)), tokens[start:end], state)
        return True

    def _save_whole(self, slot: int, tokens: list[int], chain: HashChain) -> None:
        """Queue the whole state of an idle slot with its latest checkpoints, if it is missing."""
        digest = chain.prefix(tokens, len(tokens))
        if self.index.has_whole(digest) or digest in self._queued:
            return
        checkpoints = [
            checkpoint
            for checkpoint in self.ledger.checkpoints.of_slot(slot)[-MAX_SAVED_CHECKPOINTS:]
            if MIN_LOADED_TOKENS <= checkpoint.length < len(tokens)
        ]
        nbytes = self.store.estimate_bytes(len(tokens)) + sum(
            len(checkpoint.state) for checkpoint in checkpoints
        )
        if not self._has_room(nbytes):
            return
        swapped = self.store.copy_state(slot)
        if swapped is None:
            return
        try:
            state = b"".join([swapped.state, *(checkpoint.state for checkpoint in checkpoints)])
        except MemoryError:
            return
        lengths = sorted({checkpoint.length for checkpoint in checkpoints} | {len(tokens)})
        entry = Entry(
            "whole",
            0,
            tuple((length, chain.prefix(tokens, length)) for length in lengths),
            len(state),
            tuple((checkpoint.length, len(checkpoint.state)) for checkpoint in checkpoints),
        )
        self._put(entry, tokens[:], state)

    def _put(self, entry: Entry, tokens: Sequence[int], state: bytes | memoryview) -> None:
        self._queued.update(digest for _, digest in entry.ends)
        self.writer.enqueue(WriteJob(entry, tokens, state))

    def _has_room(self, nbytes: float) -> bool:
        """Return whether a state may wait in the queue. If it may not, it is tried again after the
        next write. An empty queue always takes one.
        """
        queued = self.writer.nbytes
        has_room = not queued or (
            queued + nbytes <= MAX_QUEUED_BYTES and self.store.has_room(nbytes)
        )
        self._lacks_room = not has_room
        if self._lacks_room and not self.writer.nbytes:  # it was written just now
            self._lacks_room, has_room = False, True
        return has_room

    def _spare_sequence(self) -> int | None:
        """Return a sequence without cells: one that belongs to no slot, or an idle slot; or None."""
        ledger = self.ledger
        if (spare := ledger.memory.spare_sequence) is not None:
            return spare
        empty = (slot for slot, tokens in enumerate(ledger.tokens) if not tokens)
        return next((slot for slot in empty if not ledger.is_busy(slot)), None)

    def _end_write(self, entry: Entry, is_written: bool) -> None:
        """Add a written entry to the index. Runs on the writer's thread."""
        if is_written:
            self.index.add(entry)
        self._queued.difference_update(digest for _, digest in entry.ends)
        if self._lacks_room:
            self._lacks_room = False
            self.on_room()

    # Loading

    def start_load(
        self, tokens: Sequence[int], scope: str, n_cached: int, reads_all: bool = False
    ) -> StateLoad:
        """Start to look for the beginning of a prompt. `tokens`: the prompt without its last token.
        `n_cached`: tokens of it that the pool has, which are not read unless `reads_all`.
        """
        return self.loader.start(tokens, scope, n_cached, reads_all)

    def is_searched(self, tokens: Sequence[int], n_cached: int) -> bool:
        """Return whether enough tokens of a prompt are missing in the pool to look for them. The
        last one is always computed.
        """
        return len(tokens) - 1 >= n_cached + MIN_LOADED_TOKENS

    def restore(
        self, load: StateLoad, tokens: Sequence[int], scope: str, named_slot: int | None = None
    ) -> int:
        """Move what a load has read into an idle slot, if the pool has room. The load must be done,
        and is ended. `named_slot`: the slot, if the prompt names one; the load then `reads_all`.
        Return the length of the beginning that is now in the pool because of it, or 0.
        """
        future = load.future
        self.loader.end(load)
        if (error := future.exception()) is not None:
            if isinstance(error, OSError | MemoryError):
                self.writer.report_once(f"saved states cannot be read: {error}")
            else:
                self.writer.report_bug(error, "a saved state was not read")
            return 0
        swapped, ledger = future.result(), self.ledger
        if swapped is None:
            return 0
        if ledger.reusable_prefix(tokens, scope, named_slot) >= len(swapped.tokens):
            return 0
        with ledger.keep_prefix(swapped.tokens[: swapped.start], scope):
            if not ledger.n_idle or swapped.n_cells > ledger.size - ledger.busy_cells:
                return 0
            if named_slot is None:
                slot = ledger.claim_slot(scope)
            else:
                slot = named_slot
                self.save_slot(slot)
                ledger.claim_named_slot(slot, (), scope)
            is_restored = self.store.swap_in(slot, swapped)
            ledger.release(slot)
        self._read_bytes += len(swapped.state) if is_restored else 0
        return len(swapped.tokens) if is_restored else 0

    def record_reuse(self, n_tokens: int) -> None:
        """Count tokens of a prompt that were not computed because of the cache."""
        self._read_tokens += n_tokens

    def _is_worth_reading(self, n_tokens: int, nbytes: int) -> bool:
        """Return whether entries are faster to read and restore than their tokens are to compute."""
        costs = self.store.costs
        seconds = self._byte_seconds + costs.byte_seconds if self._byte_seconds else 0.0
        return is_worth_restoring(StateCost(n_tokens, nbytes, costs.token_seconds, seconds))

    def _record_read(self, nbytes: int, seconds: float) -> None:
        """Record how long reading took. Runs on the loader's thread."""
        self._byte_seconds = moving_average(self._byte_seconds, seconds / nbytes)

    def _report_damage(self, name: str, reason: str) -> None:
        self._n_damaged += 1
        self.writer.report_once(
            f"a saved state is not used ({self.folder.path / name}): {reason}", reason
        )

    # Closing

    def flush(self, seconds: float) -> None:
        """Copy what is pending to the queue, and wait for room in it for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            if not self.save_part(is_idle=True):
                time.sleep(WAIT_SECONDS)

    def close(self, seconds: float) -> None:
        """Wait until the queue is written, for at most `seconds`, and end the threads."""
        self.writer.close(seconds)
        self.loader.close()
