"""A llama.cpp context: the KV cache, and the forward pass that fills it.

llama.cpp aborts the process when it gets wrong arguments. They are checked here before each call
(src/llama-context.cpp, src/llama-batch.cpp, src/llama-kv-cache.cpp). Only the length of each
sequence is tracked for these checks (positions.py); which cells hold which tokens is recorded in
kv_cache/ledger.py.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.kernels import pass_thread
from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp
from llmcli.runtime.binding.kernels.pass_thread import PassThread
from llmcli.runtime.binding.kv_state import sequence_state
from llmcli.runtime.binding.kv_state.positions import (
    Positions,
    Span,
    batch_spans,
    min_max,
    window_survives_shift,
)
from llmcli.runtime.binding.kv_state.shared_cells import SharedCells
from llmcli.runtime.binding.kv_state.state_ranges import CellRange, join_ranges
from llmcli.runtime.binding.library import last_log_lines, lib, reset_log
from llmcli.runtime.binding.memory_breakdown import MemoryBreakdown, read_memory_breakdown
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import (
    GET_LOGITS_ITH,
    UNSET_FLAG,
    Batch,
    BatchRows,
    StopFlag,
    TreeBatch,
    abort_callback,
    no_cache_error,
    pointer_address,
)
from llmcli.runtime.binding.rows.logits_row import LogitsRow


class Aborted(Exception):
    """Raised when a forward pass was interrupted. The caller must cut the sequences of the pass
    back to their earlier lengths.
    """


class NoSlot(Exception):
    """Raised when the KV cache has no room for a batch. The cache is unchanged."""


@dataclass(frozen=True, slots=True)
class _BegunPass:
    """A pass that the pass thread computes: its rows, and the positions that it adds to each
    sequence.
    """

    rows: BatchRows
    added: tuple[Span, ...]


class Context:
    """An open llama.cpp context. Made by `open_context`, and unusable after its `with` block."""

    def __init__(
        self,
        pointer: Any,
        model: Model,
        stop: StopFlag,
        options: ContextOptions,
        decide_shift: Callable[["Context"], bool],
        begin_pass: Callable[[], None] | None,
    ) -> None:
        """`decide_shift`: a function that decides whether cells can be moved to other positions. It
        is called at most once, because it may have to run a trial. `begin_pass`: a function to call
        before each pass (gemm.registered).
        """
        library = lib()
        self.pointer, self.stop, self.unified = pointer, stop, options.unified
        self.options, self.outputs_states = options, options.outputs_states
        self.outputs_final_states = options.outputs_final_states
        self._has_final_states = False  # whether those of the last pass can be read
        self.n_ctx: int = library.llama_n_ctx(pointer)
        if model.max_positions is not None:  # llama.cpp rounds the number of cells up
            self.n_ctx = min(self.n_ctx, model.max_positions)
        self.n_batch: int = library.llama_n_batch(pointer)
        self.n_ubatch: int = library.llama_n_ubatch(pointer)
        # of the hidden states that llama.cpp keeps of the rows of a pass
        self.state_bytes: int = 4 * model.n_embd * self.n_batch * options.outputs_states
        self.n_seq_max = options.n_seq_max
        self.n_outputs = max(options.n_outputs, options.n_sequences)
        self.can_append, self._max_outputs = options.can_append, options.n_sequences
        # whether the state of scattered cells may be cut out of the state of the pool; decided by
        # open_prefill_context()
        self.reads_pool = False
        # The cache of an encoder-decoder model cannot be used without a pass of its encoder.
        self.memory = None if model.is_encoder_decoder else library.llama_get_memory(pointer)
        self.n_embd = model.n_embd
        self.n_vocab, self.n_swa, self.is_recurrent = (
            model.n_vocab,
            0 if options.swa_full else model.n_swa,
            model.is_recurrent,
        )
        self._model = model
        self.gemm_min_rows = options.gemm_min_rows
        self._begin_pass = begin_pass
        self.has_complete_states = not (options.swa_full and model.n_swa)
        self._decide_shift = decide_shift
        # When a batch has several micro-batches, llama.cpp drops old cells of a window for the last
        # micro-batch before it computes the first (prepare and apply_ubatch of llama-kv-cache.cpp).
        # If cells of several sequences are mixed, the first micro-batch still needs some of the
        # dropped cells, and logits are off by 0.1 to 1. A pass therefore has one micro-batch.
        if self.n_swa and self.n_seq_max > 1:
            self.n_batch = self.n_ubatch
        # Recurrent state can go back by this many tokens at most, and only within the last pass of
        # a sequence. `_n_droppable` has their number for each sequence.
        self.n_rs_seq: int = library.llama_n_rs_seq(pointer) if model.is_recurrent else 0
        self._n_droppable: dict[int, int] = {}
        # sequences that have gone back since their last pass; llama.cpp would copy their later state
        self._returned: set[int] = set()
        # sequences whose state an interrupted pass left neither old nor new (`_forward`)
        self._damaged: set[int] = set()
        self._batch = Batch(self.n_batch)
        # the most branches of a tree of tokens, with the sequence itself
        self.max_branches = 1 + options.n_branches
        self._first_branch = options.n_sequences - options.n_branches
        self._open_branches: list[int] = []  # their sequence ids
        self._positions, self._shared_cells, self.log_sum_exp = (
            Positions(options.n_sequences),
            SharedCells(),
            LogSumExp(),
        )
        # called with the rows of every pass after it, while its hidden states can be read
        self.on_computed: Callable[[BatchRows], None] | None = None
        self._pass_thread: PassThread | None = None  # started by the first begin_decode()
        self._begun_pass: _BegunPass | None = None  # until end_decode()
        self._rows: dict[int, LogitsRow] = {}  # LogitsRow objects for reuse, by address
        # addresses as plain integers, because creating a ctypes pointer for each token is slow
        # right after a pass
        self._address, self._logits = (
            pointer_address(pointer),
            GET_LOGITS_ITH(pointer_address(library.llama_get_logits_ith)),
        )

    def decode(self, rows: BatchRows) -> list[LogitsRow]:
        """Compute one forward pass. Return the logits of the rows that asked for them, in the order
        of the batch. They are valid until the next pass.

        Raises NoSlot when the cache is full (it is unchanged), Aborted when the pass was
        interrupted (the caller must cut its sequences back), and UserError when llama.cpp fails.
        """
        self._check(rows)
        if self._open_branches:
            self.drop_branches()
        if self.outputs_final_states:
            self._set_final_states(all(rows.wants_logits))
        if rows.branches:
            self._forward_tree(rows)
        else:
            added = batch_spans(rows.positions, rows.sequences)
            self._batch.fill(rows)
            self._forward(self._batch, added)
        if self.on_computed:
            self.on_computed(rows)
        return self._wanted_rows(rows)

    def _wanted_rows(self, rows: BatchRows) -> list[LogitsRow]:
        """Return the logits of the rows of the last pass that asked for them."""
        # a shortcut for one row, the most frequent case: code is slow right after a pass
        if len(rows) == 1 and rows.wants_logits[0]:
            return [self.logits_row(0)]
        result = [
            self.logits_row(index) for index, wanted in enumerate(rows.wants_logits) if wanted
        ]
        if not result:
            # on a GPU llama_decode returns before the pass is complete; only reading a row waits
            lib().llama_synchronize(self.pointer)
        return result

    @property
    def can_begin_decode(self) -> bool:
        """Return whether `begin_decode` can compute passes: llmcli's C code is installed, the cells
        of a pass can be removed again, and nothing reads hidden states of a pass.
        """
        return not (
            self.is_recurrent
            or self.n_swa
            or self.outputs_states
            or self.outputs_final_states
            or self.on_computed
            or pass_thread.load_library() is None
        )

    def begin_decode(self, rows: BatchRows) -> None:
        """Start to compute a pass on another thread, in which no row belongs to a tree. Until
        `end_decode` has returned or raised, no other method may be called that reads or changes the
        cache, or computes a pass. The logits of the last pass can no longer be read.

        Raises UserError like `decode`, and OSError if the system gives no thread.
        """
        assert self.can_begin_decode and self._begun_pass is None, "a pass is being computed"
        assert not (rows.branches or self._open_branches), "branches"
        self._check(rows)
        if self._pass_thread is None:
            library = pass_thread.load_library()
            self._pass_thread = PassThread(library, pointer_address(self.pointer))
        added = tuple(batch_spans(rows.positions, rows.sequences))
        self._positions.check(added)
        self._batch.fill(rows)
        if self._begin_pass:
            self._begin_pass()
        self._begun_pass = _BegunPass(rows, added)
        self._pass_thread.begin(self._batch.struct)

    def end_decode(self) -> tuple[list[LogitsRow], float]:
        """Wait for the pass that `begin_decode` has started. Return the logits of its rows as
        `decode` does, and the seconds of the computation. Raises like `decode`.
        """
        begun = self._begun_pass
        assert begun is not None and self._pass_thread is not None, "no pass was begun"
        code, seconds = self._pass_thread.end()
        self._begun_pass = None
        self._end_forward(code, begun.added)
        return self._wanted_rows(begun.rows), seconds

    def close_pass_thread(self) -> None:
        """Wait for a running pass, and end the thread that computes such passes."""
        if self._pass_thread is not None:
            self._pass_thread.close()

    def prepare(self, rows: BatchRows) -> Callable[[], None]:
        """Check a batch and copy it into C arrays, but do not compute it. Return a function that
        computes the pass and waits for its end. A benchmark that calls it measures llama.cpp
        without this checking and copying.
        """
        self._check(rows)
        assert not self.outputs_final_states, "decode() decides which states can be read"
        batch = Batch(len(rows))
        batch.fill(rows)
        return partial(self._forward_and_wait, batch, batch_spans(rows.positions, rows.sequences))

    def _forward_and_wait(self, batch: Batch, added: Collection[Span]) -> None:
        """Compute a pass and wait for its end, because on a GPU llama_decode returns earlier."""
        self._forward(batch, added)
        lib().llama_synchronize(self.pointer)

    def _forward(self, batch: Batch, added: Collection[Span]) -> None:
        """Compute a pass and update the lengths of its sequences. `added`: the positions that the
        batch adds to each sequence. Raises like `decode`.
        """
        assert self._begun_pass is None, "a pass is being computed"
        self._positions.check(added)
        assert not self._damaged or all(sequence not in self._damaged for sequence, _, _ in added)
        if self._begin_pass:
            self._begin_pass()
        self._end_forward(lib().llama_decode(self.pointer, batch.struct), added)

    def _end_forward(self, code: int, added: Collection[Span]) -> None:
        """Update the lengths of the sequences of a pass. `code`: the result of llama_decode. Raises
        like `decode`.
        """
        # not reset earlier, because Ctrl-C may have come while the batch was filled
        self.stop.reset()
        if code == 0:
            self._positions.advance(added)
            if self.n_rs_seq:
                for sequence, start, stop in added:
                    self._n_droppable[sequence] = min(self.n_rs_seq, stop - start - 1)
                    self._returned.discard(sequence)
            return
        if code == 1:
            raise NoSlot
        for sequence, _, _ in added:
            self._sync_length(sequence)
            # llama.cpp drops the rows of the micro-batch that failed (llama_context::decode). It
            # takes this for a return within the last pass, but only the layers that were computed
            # have stored that pass, and a pass of one row stores nothing to return to.
            if self.n_rs_seq and self._positions.length(sequence):
                self._damaged.add(sequence)
        if code == 2:
            raise Aborted
        reason = last_log_lines() or "no reason given"
        raise UserError(
            f"llama.cpp could not compute this batch (code {code}): {reason}",
            hint="try a smaller --ctx-size or --ubatch-size",
        )

    def _forward_tree(self, rows: BatchRows) -> None:
        """Compute a pass whose rows belong to the branches of a tree of tokens. Each branch gets a
        sequence with the cells of the text, until `drop_branches`. Raises like `decode`.

        llama.cpp lets a row attend to the cells of one of its sequences (src/llama-kv-cache.cpp,
        set_input_kq_mask): those of the text, and of the nodes before it.
        """
        slot, count = rows.sequences[0], 1 + max(max(branches) for branches in rows.branches)
        length = self._positions.length(slot)
        ids = [slot, *range(self._first_branch, self._first_branch + count - 1)]
        self._open_branches = ids[1:]
        for branch in self._open_branches:
            lib().llama_memory_seq_cp(self.memory, slot, branch, 0, length)
            self._positions.set_length(branch, length)
        sequences = [[ids[branch] for branch in branches] for branches in rows.branches]
        pairs = [
            (position, sequence)
            for position, row in zip(rows.positions, sequences, strict=True)
            for sequence in row
        ]
        batch = self._tree_batch
        batch.fill_tree(rows, sequences)
        try:
            self._forward(batch, batch_spans(*zip(*pairs, strict=True)))
        except BaseException:
            self.drop_branches()
            raise

    @cached_property
    def _tree_batch(self) -> TreeBatch:
        return TreeBatch(self.n_batch, self.max_branches)

    def keep_branch(self, sequence: int, branch: int, start: int, end: int) -> None:
        """Append the cells of a branch of the last pass, from position `start` to `end`, to its
        sequence, which must end at `start`.
        """
        source = self._open_branches[branch - 1]
        assert self._positions.length(sequence) == start < end <= self._positions.length(source)
        lib().llama_memory_seq_cp(self.memory, source, sequence, start, end)
        self._positions.set_length(sequence, end)

    def drop_branches(self) -> None:
        """Drop the cells that only branches of the last pass have."""
        for branch in self._open_branches:
            lib().llama_memory_seq_rm(self.memory, branch, -1, -1)
            self._positions.set_length(branch, 0)
        self._open_branches = []

    def logits_row(self, index: int) -> LogitsRow:
        """Return the logits of row `index` of the last batch. The row must have asked for them."""
        address = self._logits(self._address, index)
        assert address, f"row {index} has no logits"
        row = self._rows.get(address)
        if row is None:
            row = self._rows[address] = LogitsRow(self, address)
        row.index = index
        return row

    def final_state(self, index: int) -> NDArray[np.float32] | None:
        """Return the hidden state of row `index` of the last pass, `[n_embd]`: the output of the
        final norm, from which the output matrix computes the row's logits. Return None when a row
        of the pass had no logits, because llama.cpp would then compute logits for all of its rows.
        """
        if not self._has_final_states:
            return None
        pointer = lib().llama_get_embeddings_ith(self.pointer, index)
        assert pointer, f"row {index} has no hidden state"
        return np.ctypeslib.as_array(pointer, (self.n_embd,)).copy()

    def stop_final_states(self) -> None:
        """Make no final hidden states readable any more."""
        self._set_final_states(False)
        self.outputs_final_states = False

    def _set_final_states(self, wanted: bool) -> None:
        """Make the final hidden states of the next pass readable, or not."""
        if wanted != self._has_final_states:
            lib().llama_set_embeddings(self.pointer, wanted)
            self._has_final_states = wanted

    def set_threads(self, count: int, batch_count: int) -> None:
        """Set the numbers of threads for later passes: `count` for passes with one row, and
        `batch_count` for passes with several rows.
        """
        assert count > 0 and batch_count > 0, (count, batch_count)
        lib().llama_set_n_threads(self.pointer, count, batch_count)

    def interrupt(self) -> None:
        """Make the running forward pass raise Aborted within milliseconds. If no pass is running,
        the next one raises it.

        Safe to call from a signal handler.
        """
        self.stop.request_stop()

    def _check(self, rows: BatchRows) -> None:
        """Assert that llama.cpp would accept the rows of a batch. Raises UserError for a model
        without a KV cache, and for a position beyond those that the model has learned.
        """
        if not self.memory:
            raise no_cache_error(self._model.is_diffusion, self._model.is_encoder_decoder)
        count = len(rows)
        assert 0 < count <= self.n_batch, (count, self.n_batch)
        assert len(rows.positions) == len(rows.sequences) == len(rows.wants_logits) == count
        wanted = sum(rows.wants_logits)
        assert wanted <= self.n_outputs, "more outputs than the context was made for"
        self._max_outputs = max(self._max_outputs, wanted)
        low, high = min_max(rows.tokens)
        assert low >= 0 and high < self.n_vocab, "token outside the vocabulary"
        low, high = min_max(rows.sequences)
        assert low >= 0 and high < self.n_seq_max, "sequence id out of range"
        if rows.branches:
            assert len(rows.branches) == count and all(rows.branches), "a row without a branch"
            assert low == high and self.can_branch, "branches of several sequences"
            assert max(map(max, rows.branches)) < self.max_branches, "too many branches"
        limit = self._model.max_positions
        if limit is not None and min_max(rows.positions)[1] >= limit:
            raise UserError(
                f"the model has learned {limit:,} positions, and this text has more tokens",
                hint="use fewer tokens",
            )

    # The methods that the ledger uses (CacheMemory). Sequence ids are checked, because llama.cpp
    # aborts on an id out of range.

    def trim(self, sequence: int, keep: int) -> bool:
        """Drop the cells of a sequence from position `keep` on. Return False, with nothing changed,
        when the sequence cannot be cut there.

        A sequence with a sliding window cannot be cut when the next token, at `keep`, would attend
        to cells that the window has dropped already. Recurrent state can be dropped as a whole, or
        go back once within the last pass by at most `n_rs_seq` tokens, unless this pass failed.
        """
        self._check_sequences(sequence)
        assert keep >= 0, keep
        if not keep:
            self._damaged.discard(sequence)
        elif sequence in self._damaged:
            return False
        length = self._positions.length(sequence)
        if keep >= length:
            return True
        if self.is_recurrent and length - keep > self._n_droppable.pop(sequence, 0) and keep:
            return False
        if self.n_swa and keep and self.first_position(sequence) > max(0, keep + 1 - self.n_swa):
            return False
        if not lib().llama_memory_seq_rm(self.memory, sequence, keep, -1):
            return False
        if self.is_recurrent:
            (self._returned.add if keep else self._returned.discard)(sequence)
        self._positions.set_length(sequence, keep)
        self._shared_cells.record_cut(sequence, keep)
        return True

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Make `target` share the cells of `source` from position `start` to `end`. `target` must
        end at `start`, because llama.cpp would otherwise store two cells for one position.

        Without a unified pool, or with recurrent state, `start` to `end` must be the whole sequence
        and `target` must be empty.
        """
        self._check_sequences(source, target)
        assert source != target and 0 <= start < end <= self._positions.length(source), (
            source,
            target,
            start,
            end,
        )
        assert self._positions.length(target) == start, f"sequence {target} does not end at {start}"
        needs_whole = self.is_recurrent or not self.unified
        assert source not in self._returned, "a state that goes back only in the next pass"
        assert source not in self._damaged, "the state of a pass that failed"
        assert not needs_whole or (start == 0 and end == self._positions.length(source)), (
            "only a whole sequence"
        )
        lib().llama_memory_seq_cp(
            self.memory, source, target, -1 if needs_whole else start, -1 if needs_whole else end
        )
        self._positions.set_length(target, end)
        if self.unified:
            self._shared_cells.record_copy(source, target, start, end)

    @property
    def can_branch(self) -> bool:
        """Return whether passes over trees of tokens are possible."""
        return self.max_branches > 1 and self.unified and not self.is_recurrent and not self.n_swa

    @cached_property
    def can_shift(self) -> bool:
        """Return whether cells can be moved to other positions. The first call may run a trial
        (shift_support.py).
        """
        return self._decide_shift(self)

    def shift(self, sequence: int, start: int, end: int, last: int) -> None:
        """Drop the cells at the positions from `start` to `end`, and move the later cells down to
        `start`. Their keys are rotated to the new positions.

        `last`: the token at the last position. It is computed again at its new position, because
        llama.cpp rotates keys only as part of a pass. This pass cannot be interrupted. The cells
        that move must not belong to another sequence.

        Raises UserError when the pass fails; all sequences are empty then.
        """
        self._check_sequences(sequence)
        assert self.can_shift, "this memory cannot move cells"
        length = self._positions.length(sequence)
        assert 0 <= start < end < length, (start, end, length)
        assert end >= self._shared_cells.shared_end(sequence), (
            "cells that another sequence holds would move"
        )
        first = self.first_position(sequence) if self.n_swa else 0
        assert window_survives_shift(first, start, end, length, self.n_swa), (
            "the window would have a hole"
        )
        assert 0 <= last < self.n_vocab, last
        library, new_length = lib(), length - (end - start)
        library.llama_memory_seq_rm(self.memory, sequence, start, end)
        library.llama_memory_seq_add(self.memory, sequence, end, length, start - end)
        library.llama_memory_seq_rm(self.memory, sequence, new_length - 1, -1)
        self._batch.fill(BatchRows([last], [new_length - 1], [sequence], [False]))
        reset_log()
        self._set_final_states(False)
        if self._begin_pass:
            self._begin_pass()
        library.llama_set_abort_callback(self.pointer, *abort_callback(UNSET_FLAG))
        code = library.llama_decode(self.pointer, self._batch.struct)
        library.llama_synchronize(self.pointer)
        library.llama_set_abort_callback(self.pointer, *abort_callback(self.stop.flag))
        self._shared_cells.record_cut(sequence, start)
        self._positions.set_length(sequence, new_length)
        if code or "K-shift" in last_log_lines():
            self.clear()
            reason = last_log_lines() or "no reason given"
            raise UserError(
                f"llama.cpp could not move the cells of the context (code {code}): {reason}",
                hint="try again: the context is recomputed; --on-full stop avoids moving cells",
            )

    def first_position(self, sequence: int) -> int:
        """Return the lowest position of a sequence that is still in the cache, or −1 for an empty
        sequence. It is above 0 when a sliding window has dropped cells.
        """
        self._check_sequences(sequence)
        return int(lib().llama_memory_seq_pos_min(self.memory, sequence))

    def last_position(self, sequence: int) -> int:
        """Return the highest position of a sequence, or −1 for an empty sequence."""
        self._check_sequences(sequence)
        return int(lib().llama_memory_seq_pos_max(self.memory, sequence))

    def clear(self) -> None:
        """Drop the cells of all sequences. The bytes in the buffers are not overwritten."""
        lib().llama_memory_clear(self.memory, False)
        self._positions.clear()
        self._shared_cells.clear()
        self._n_droppable.clear()
        self._returned.clear()
        self._damaged.clear()

    def read_state(self, sequence: int, start: int = 0) -> memoryview:
        """Return the state of a sequence as bytes for `write_state` or `append_state`.

        With `start`, the state contains only the positions from `start` on. To leave out the
        earlier cells, they are dropped from the cache, so the caller must empty the sequence
        afterwards.
        """
        self._check_sequences(sequence)
        assert 0 <= start < max(1, self._positions.length(sequence)), start
        if start:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, start)
        return sequence_state.read_state(
            self.pointer, sequence, self.reads_pool and self._positions.is_scattered(sequence)
        )

    @property
    def spare_sequence(self) -> int | None:
        """Return a sequence id beside those of the slots that has no cells between two passes, or
        None if the context was opened without one.
        """
        return self.n_seq_max if self.options.n_sequences > self.n_seq_max else None

    def read_range(self, sequence: int, start: int, end: int, spare: int | None) -> memoryview:
        """Return the state of the positions from `start` to `end`, whose cells stay where they are.
        Only for a unified cache without windows and recurrent state. `spare`: a sequence without
        cells, which shares the cells for the moment; None: all of the sequence is read, and cut.

        Raises ForeignLayout if this build of llama.cpp stores states in another way.
        """
        self._check_sequences(sequence)
        assert self.unified and not self.is_recurrent, "a part of a state that has no parts"
        assert 0 <= start < end <= self._positions.length(sequence), (start, end)
        if spare is None:
            return join_ranges([CellRange(self.read_state(sequence), start, end)])
        self.drop_branches()
        assert not self._positions.length(spare), f"sequence {spare} has cells"
        lib().llama_memory_seq_cp(self.memory, sequence, spare, start, end)
        try:
            return sequence_state.read_state(self.pointer, spare)
        finally:
            lib().llama_memory_seq_rm(self.memory, spare, -1, -1)

    def write_state(
        self, sequence: int, saved_state: bytes | memoryview, start: int = 0, source: int = -1
    ) -> bool:
        """Replace the cells of a sequence by those of a state from `read_state`. Return False, with
        the sequence empty, when llama.cpp refuses the state.

        If the state was read from position `start` on, the cells before `start` are shared with the
        sequence `source`.
        """
        self._check_sequences(sequence)
        # llama.cpp would not drop the old cells if the state is that of an empty sequence
        self._empty(sequence)
        accepted = sequence_state.write_state(self.pointer, sequence, saved_state)
        if accepted and start:
            assert self.unified and not self.is_recurrent and source != sequence, (source, sequence)
            assert start <= self._positions.length(source), (source, start)
            lib().llama_memory_seq_cp(self.memory, source, sequence, 0, start)
            self._shared_cells.record_copy(source, sequence, 0, start)
        if accepted:
            self._sync_length(sequence)
        else:
            self._empty(sequence)
        return accepted

    def append_state(self, sequence: int, saved_state: memoryview, start: int) -> bool:
        """Append cells that another context computed to a sequence. `start`: the current length of
        the sequence. Return False, with the sequence unchanged, when llama.cpp refuses the state.
        """
        self._check_sequences(sequence)
        assert self.can_append and start == self._positions.length(sequence), (
            start,
            self._positions.length(sequence),
        )
        accepted = sequence_state.append_state(
            self.pointer, self.memory, sequence, self.n_seq_max, saved_state, start > 0
        )
        self._positions.set_length(sequence, self.last_position(sequence) + 1)
        return accepted

    @property
    def needs_checkpoints(self) -> bool:
        """Return whether a sequence can be set back to some earlier lengths only with a checkpoint:
        with recurrent state, and with a sliding window smaller than the pool.
        """
        return self.unified and (self.is_recurrent or 0 < self.n_swa < self.n_ctx)

    def checkpoint_size(self, sequence: int) -> int:
        """Return the number of bytes of `read_checkpoint`."""
        self._check_sequences(sequence)
        return sequence_state.partial_size(self.pointer, sequence)

    def read_checkpoint(self, sequence: int) -> memoryview:
        """Return the part of a sequence's state that cannot be cut, for `restore_checkpoint`."""
        self._check_sequences(sequence)
        assert self.needs_checkpoints and self._positions.length(sequence), sequence
        return sequence_state.read_partial_state(self.pointer, sequence)

    def restore_checkpoint(
        self, sequence: int, checkpoint: memoryview, length: int, source: int | None = None
    ) -> bool:
        """Set a sequence back to its first `length` tokens, after which the state `checkpoint` was
        read. Return False, with the sequence empty, when llama.cpp refuses the state.

        With another sequence `source`, the first `length` tokens are those of `source`, whose cells
        outside the checkpoint are shared.
        """
        self._check_sequences(sequence)
        library = lib()
        if source is not None:
            self._check_sequences(source)
            assert self.unified and source != sequence, (source, sequence)
            self._empty(sequence)
            library.llama_memory_seq_cp(self.memory, source, sequence, 0, length)
        accepted = sequence_state.write_partial_state(self.pointer, sequence, checkpoint)
        if not accepted or not library.llama_memory_seq_rm(self.memory, sequence, length, -1):
            self._empty(sequence)
            return False
        self._forget_passes(sequence)
        self._positions.set_length(sequence, length)
        self._shared_cells.record_cut(sequence, length)
        if source is not None:
            self._shared_cells.record_copy(source, sequence, 0, length)
        assert self.last_position(sequence) == length - 1, (self.last_position(sequence), length)
        return True

    def _empty(self, sequence: int) -> None:
        """Drop all cells of a sequence."""
        self._forget_passes(sequence)
        lib().llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self._positions.set_length(sequence, 0)
        self._shared_cells.record_cut(sequence, 0)

    def _forget_passes(self, sequence: int) -> None:
        """Record that the recurrent state of a sequence is not that of its last pass any more."""
        self._n_droppable.pop(sequence, None)
        self._returned.discard(sequence)
        self._damaged.discard(sequence)

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the buffer for logits and hidden states, which llama.cpp's memory
        breakdown does not include. The buffer has a row per sequence, and grows when a pass asks
        for more rows (llama_context::output_reserve).
        """
        return 4 * self.output_row_values * self._max_outputs + self.state_bytes

    @property
    def output_row_values(self) -> int:
        """Return the number of floats of a row of the output buffer."""
        return self.n_vocab + self.n_embd * self.outputs_final_states

    def memory_breakdown(self) -> MemoryBreakdown | None:
        """Return the bytes that llama.cpp allocated for this context and its model. Return None
        when this build does not report them.
        """
        return read_memory_breakdown(self.pointer)

    def _check_sequences(self, *sequences: int) -> None:
        """Assert that the sequence ids exist, because llama.cpp aborts on an id out of range, and
        that no pass is being computed, which reads and changes the cache.
        """
        assert self._begun_pass is None, "a pass is being computed"
        assert all(0 <= sequence < self.n_seq_max for sequence in sequences), (
            sequences,
            self.n_seq_max,
        )

    def _sync_length(self, sequence: int) -> None:
        """Set the recorded length of a sequence to its length in llama.cpp.

        When a pass that ended early has dropped all cells of a sliding window, llama.cpp reports an
        empty sequence although the layers without a window still have cells. These cells are
        dropped here. Otherwise later tokens would be stored next to old tokens with the same
        positions.
        """
        length = int(lib().llama_memory_seq_pos_max(self.memory, sequence)) + 1
        if not length:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, -1)
        self._positions.set_length(sequence, length)
        self._shared_cells.record_cut(sequence, length)
