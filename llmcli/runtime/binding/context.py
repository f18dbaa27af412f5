"""One llama.cpp context: the KV cache and the forward pass.

llama.cpp aborts the process when it gets wrong arguments. Everything that it would abort on is
checked here before a call (src/llama-context.cpp, src/llama-batch.cpp, src/llama-kv-cache.cpp).
Positions are tracked only for these checks (positions.py); the ledger records which cells hold
which tokens.
"""

from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding import sequence_state
from llmcli.runtime.binding.batch import (
    GET_LOGITS_ITH,
    UNSET_FLAG,
    Batch,
    BatchRows,
    StopFlag,
    abort_callback,
    no_cache_error,
    pointer_address,
)
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp
from llmcli.runtime.binding.library import last_log_lines, lib, reset_log
from llmcli.runtime.binding.logits_row import LogitsRow
from llmcli.runtime.binding.memory_breakdown import MemoryBreakdown, read_memory_breakdown
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.positions import (
    Positions,
    Span,
    batch_spans,
    min_max,
    window_survives_shift,
)
from llmcli.runtime.binding.shared_cells import SharedCells


class Aborted(Exception):
    """The forward pass was interrupted; its sequences must be cut back to their earlier length."""


class NoSlot(Exception):
    """The KV cache had no room for the batch; nothing was changed."""


class Context:
    """An open context, made by `open_context`; unusable after its `with` block."""

    def __init__(
        self,
        pointer: Any,
        model: Model,
        stop: StopFlag,
        options: ContextOptions,
        ask_shift: Callable[["Context"], bool],
    ) -> None:
        """`ask_shift`: called at most once, to decide whether cells can be moved to other
        positions.
        """
        library = lib()
        self.pointer, self.stop, self.unified = pointer, stop, options.unified
        self.n_ctx: int = library.llama_n_ctx(pointer)
        self.n_batch: int = library.llama_n_batch(pointer)
        self.n_ubatch: int = library.llama_n_ubatch(pointer)
        self.n_seq_max = options.n_seq_max
        self.n_outputs = max(options.n_outputs, options.n_sequences)
        self.can_append, self._most_outputs = options.can_append, options.n_sequences
        self.memory = library.llama_get_memory(pointer)
        self.n_vocab, self.n_swa, self.is_recurrent = (
            model.n_vocab,
            0 if options.swa_full else model.n_swa,
            model.is_recurrent,
        )
        self._diffuses = model.is_diffusion
        self.has_complete_states = not (options.swa_full and model.n_swa)
        self._ask_shift = ask_shift
        # When a batch has several micro-batches, llama.cpp drops old cells of a window for the last
        # micro-batch before it computes the first (prepare and apply_ubatch of llama-kv-cache.cpp).
        # If cells of several sequences are mixed, the first micro-batch still needs some of the
        # dropped cells, and logits are off by 0.1 to 1. A pass therefore has one micro-batch.
        if self.n_swa and self.n_seq_max > 1:
            self.n_batch = self.n_ubatch
        self._batch = Batch(self.n_batch)
        self._positions, self._sharing, self.log_sum_exp = (
            Positions(self.n_seq_max),
            SharedCells(),
            LogSumExp(),
        )
        self._rows: dict[int, LogitsRow] = {}  # rows by their addresses, of which there are few
        # addresses as plain integers, because creating a ctypes pointer for each token is slow
        # right after a pass
        self._address, self._logits = (
            pointer_address(pointer),
            GET_LOGITS_ITH(pointer_address(library.llama_get_logits_ith)),
        )

    def decode(self, rows: BatchRows) -> list[LogitsRow]:
        """Compute one forward pass. Return the rows that asked for logits, in order.

        Raises NoSlot when the cache is full (nothing changed), Aborted when the pass was
        interrupted (the caller must cut the sequences back), and UserError when llama.cpp fails.
        """
        self._check(rows)
        added = batch_spans(rows.positions, rows.sequences)
        self._batch.fill(rows)
        self._forward(self._batch, added)
        if (
            len(rows) == 1 and rows.wants_logits[0]
        ):  # for one row, the most frequent case, less code runs right after a pass
            return [self.logits_row(0)]
        result = [
            self.logits_row(index) for index, wanted in enumerate(rows.wants_logits) if wanted
        ]
        if not result:
            lib().llama_synchronize(
                self.pointer
            )  # on a GPU decode returns before the pass is complete, and reading a row waits for it
        return result

    def prepare(self, rows: BatchRows) -> Callable[[], None]:
        """Check and lay out a pass in advance. Return a function that runs only llama.cpp, for
        measurements.
        """
        self._check(rows)
        batch = Batch(len(rows))
        batch.fill(rows)
        return partial(self._measured, batch, batch_spans(rows.positions, rows.sequences))

    def _measured(self, batch: Batch, added: Collection[Span]) -> None:
        self._forward(batch, added)
        lib().llama_synchronize(self.pointer)

    def _forward(self, batch: Batch, added: Collection[Span]) -> None:
        self._positions.check(added)
        code = lib().llama_decode(self.pointer, batch.struct)
        # not reset earlier, because Ctrl-C may have come while the batch was filled
        self.stop.reset()
        if code == 0:
            self._positions.advance(added)
            return
        if code == 1:
            raise NoSlot
        for sequence, _, _ in added:
            self._reread(sequence)
        if code == 2:
            raise Aborted
        reason = last_log_lines() or "no reason given"
        raise UserError(
            f"llama.cpp could not compute this batch (code {code}): {reason}",
            hint="try a smaller --ctx-size or --ubatch-size",
        )

    def logits_row(self, index: int) -> LogitsRow:
        """Return the logits of row `index` of the last batch."""
        address = self._logits(self._address, index)
        assert address, f"row {index} has no logits"
        row = self._rows.get(address)
        if row is None:
            row = self._rows[address] = LogitsRow(self, address)
        row.index = index
        return row

    def set_threads(self, count: int, batch_count: int) -> None:
        """Set the numbers of threads for later passes: `count` for passes with one row,
        `batch_count` for passes with several.
        """
        assert count > 0 and batch_count > 0, (count, batch_count)
        lib().llama_set_n_threads(self.pointer, count, batch_count)

    def interrupt(self) -> None:
        """Make the running forward pass raise Aborted within milliseconds, or the next one if none
        is running.

        Safe from a signal handler.
        """
        self.stop.request_stop()

    def _check(self, rows: BatchRows) -> None:
        if not self.memory:
            raise no_cache_error(self._diffuses)
        count = len(rows)
        assert 0 < count <= self.n_batch, (count, self.n_batch)
        assert len(rows.positions) == len(rows.sequences) == len(rows.wants_logits) == count
        wanted = sum(rows.wants_logits)
        assert wanted <= self.n_outputs, "more outputs than the context was made for"
        self._most_outputs = max(self._most_outputs, wanted)
        low, high = min_max(rows.tokens)
        assert low >= 0 and high < self.n_vocab, "token outside the vocabulary"
        low, high = min_max(rows.sequences)
        assert low >= 0 and high < self.n_seq_max, "sequence id out of range"

    # The methods that the ledger uses (CacheMemory). Sequence ids are checked, because llama.cpp
    # aborts on an id out of range.

    def trim(self, sequence: int, keep: int) -> bool:
        """Drop the cells of a sequence from position `keep` on. Return False, with nothing changed,
        when this memory cannot be cut there.

        It cannot be cut when a token at `keep` would need cells of a sliding window that were
        dropped already.
        """
        self._known(sequence)
        assert keep >= 0, keep
        if keep >= self._positions.length(sequence):
            return True
        if self.n_swa and keep and self.first_position(sequence) > max(0, keep + 1 - self.n_swa):
            return False
        if not lib().llama_memory_seq_rm(self.memory, sequence, keep, -1):
            return False
        self._positions.set_length(sequence, keep)
        self._sharing.record_cut(sequence, keep)
        return True

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` share the cells of `source` from `start` to `end`. `target` must end at
        `start`, because llama.cpp would otherwise write positions twice.

        With separate cells per sequence, or recurrent state, only a whole sequence can be copied,
        onto an empty one.
        """
        self._known(source, target)
        assert source != target and 0 <= start < end <= self._positions.length(source), (
            source,
            target,
            start,
            end,
        )
        assert self._positions.length(target) == start, f"sequence {target} does not end at {start}"
        needs_whole = self.is_recurrent or not self.unified
        assert not needs_whole or (start == 0 and end == self._positions.length(source)), (
            "only a whole sequence"
        )
        lib().llama_memory_seq_cp(
            self.memory, source, target, -1 if needs_whole else start, -1 if needs_whole else end
        )
        self._positions.set_length(target, end)
        if self.unified:
            self._sharing.record_copy(source, target, start, end)

    @cached_property
    def can_shift(self) -> bool:
        """Return whether cells can be moved to other positions. The first call may run a trial
        (shift_support.py).
        """
        return self._ask_shift(self)

    def shift(self, sequence: int, start: int, end: int, last: int) -> None:
        """Drop the positions from `start` to `end`, and move the later cells down to `start`, with
        their keys rotated to the new positions.

        `last`: the token at the last position. It is computed again at its new position, because
        llama.cpp rotates keys only within a pass. This pass cannot be interrupted. No other
        sequence may hold the cells that move.

        Raises UserError when the pass fails; the whole memory is empty then.
        """
        self._known(sequence)
        assert self.can_shift, "this memory cannot move cells"
        length = self._positions.length(sequence)
        assert 0 <= start < end < length, (start, end, length)
        assert end >= self._sharing.shared_end(sequence), (
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
        library.llama_set_abort_callback(self.pointer, *abort_callback(UNSET_FLAG))
        code = library.llama_decode(self.pointer, self._batch.struct)
        library.llama_synchronize(self.pointer)
        library.llama_set_abort_callback(self.pointer, *abort_callback(self.stop.flag))
        self._sharing.record_cut(sequence, start)
        self._positions.set_length(sequence, new_length)
        if code or "K-shift" in last_log_lines():
            self.clear()
            reason = last_log_lines() or "no reason given"
            raise UserError(
                f"llama.cpp could not move the cells of the context (code {code}): {reason}",
                hint="try again: the context is recomputed; --on-full stop avoids moving cells",
            )

    def first_position(self, sequence: int) -> int:
        """Return the oldest position of a sequence that is still in the cache, −1 for an empty
        sequence. It is above 0 when a sliding window has dropped cells.
        """
        self._known(sequence)
        return int(lib().llama_memory_seq_pos_min(self.memory, sequence))

    def last_position(self, sequence: int) -> int:
        """Return the newest position of a sequence, −1 for an empty sequence."""
        self._known(sequence)
        return int(lib().llama_memory_seq_pos_max(self.memory, sequence))

    def clear(self) -> None:
        """Empty all sequences. The bytes in the buffers are not overwritten."""
        lib().llama_memory_clear(self.memory, False)
        self._positions.clear()
        self._sharing.clear()

    def read_state(self, sequence: int, start: int = 0) -> memoryview:
        """Return the state of a sequence, for `write_state`. With `start` the state contains only
        the positions from `start` on. The earlier cells are dropped then, so the caller must empty
        the sequence.
        """
        self._known(sequence)
        assert 0 <= start < max(1, self._positions.length(sequence)), start
        if start:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, start)
        return sequence_state.read_state(
            self.pointer, sequence, self.can_append and self._positions.is_scattered(sequence)
        )

    def write_state(
        self, sequence: int, saved_state: bytes | memoryview, start: int = 0, source: int = -1
    ) -> bool:
        """Restore a state from `read_state` into new cells of a sequence. With `start`, the
        positions before it are shared with the sequence `source`. Return False, with the sequence
        empty, when llama.cpp refuses the state.
        """
        self._known(sequence)
        # llama.cpp would not drop the old cells if the state is that of an empty sequence
        self._empty(sequence)
        good = sequence_state.write_state(self.pointer, sequence, saved_state)
        if good and start:
            assert self.unified and not self.is_recurrent and source != sequence, (source, sequence)
            assert start <= self._positions.length(source), (source, start)
            lib().llama_memory_seq_cp(self.memory, source, sequence, 0, start)
            self._sharing.record_copy(source, sequence, 0, start)
        if good:
            self._reread(sequence)
        else:
            self._empty(sequence)
        return good

    def append_state(self, sequence: int, saved_state: memoryview, start: int) -> bool:
        """Append positions that another context computed to a sequence that ends at `start`. Return
        False, with the sequence unchanged, when llama.cpp refuses the state.
        """
        self._known(sequence)
        assert self.can_append and start == self._positions.length(sequence), (
            start,
            self._positions.length(sequence),
        )
        good = sequence_state.append_state(
            self.pointer, self.memory, sequence, self.n_seq_max, saved_state, start > 0
        )
        self._positions.set_length(sequence, self.last_position(sequence) + 1)
        return good

    def _empty(self, sequence: int) -> None:
        lib().llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self._positions.set_length(sequence, 0)
        self._sharing.record_cut(sequence, 0)

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output buffer: a row of logits per sequence, or per row of the
        largest number that a pass has asked for (llama_context::output_reserve lets it grow).
        llama.cpp's memory breakdown does not include it.
        """
        return 4 * self.n_vocab * self._most_outputs

    def memory_breakdown(self) -> MemoryBreakdown | None:
        """Return the bytes that llama.cpp allocated, or None when this build cannot be queried."""
        return read_memory_breakdown(self.pointer)

    def _known(self, *sequences: int) -> None:
        assert all(0 <= sequence < self.n_seq_max for sequence in sequences), (
            sequences,
            self.n_seq_max,
        )

    def _reread(self, sequence: int) -> None:
        """Set the recorded length of a sequence to its length in llama.cpp.

        When a pass that ended early has dropped all cells of a sliding window, llama.cpp reports an
        empty sequence although the other layers still have cells. These are dropped here; otherwise
        later tokens would be stored beside older ones of the same position.
        """
        length = self.last_position(sequence) + 1
        if not length:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, -1)
        self._positions.set_length(sequence, length)
        self._sharing.record_cut(sequence, length)
