"""One llama.cpp context: the KV cache and the forward pass.

All checks that keep llama.cpp from aborting the process are made here, before the call
(src/llama-context.cpp, src/llama-batch.cpp, src/llama-kv-cache.cpp). Positions are tracked only for
these checks (positions.py); the ledger knows which cells hold which tokens.
"""

from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding import sequence_state
from llmcli.runtime.binding.batch import (
    LOGITS_ITH,
    NEVER,
    Batch,
    Rows,
    Stop,
    abort_on,
    address,
    no_cache,
)
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp
from llmcli.runtime.binding.library import last_words, lib, listen
from llmcli.runtime.binding.logits_row import Row
from llmcli.runtime.binding.memory_breakdown import Allocated, allocated
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.positions import Positions, Span, ends, spans, window_moves
from llmcli.runtime.binding.shared_cells import Sharing
from llmcli.runtime.binding.shift_support import can_shift


class Aborted(Exception):
    """The forward pass was interrupted; its sequences must be cut back to their earlier length."""


class NoSlot(Exception):
    """The KV cache had no room for the batch; nothing was changed."""


class Context:
    """An open context, made by `open_context`; unusable after its `with` block."""

    def __init__(self, pointer: Any, model: Model, stop: Stop, options: ContextOptions) -> None:
        library = lib()
        self.pointer, self.stop, self.unified = pointer, stop, options.unified
        self.n_ctx: int = library.llama_n_ctx(pointer)
        self.n_batch: int = library.llama_n_batch(pointer)
        self.n_ubatch: int = library.llama_n_ubatch(pointer)
        self.n_seq_max = options.n_seq_max
        self.n_outputs = max(options.n_outputs, options.sequences)
        self.appends, self._most_outputs = options.appends, options.sequences
        self.memory = library.llama_get_memory(pointer)
        self.n_vocab, self.n_swa, self.recurrent = (
            model.n_vocab,
            0 if options.whole else model.n_swa,
            model.recurrent,
        )
        self._diffuses = model.diffuses
        self.whole_states = not (options.whole and model.n_swa)
        # Moved cells keep the influence of dropped text, so they differ from what the remaining
        # text alone would give.
        self._ask_shift = (
            None if options.whole else partial(can_shift, model, self.memory, options.type_k)
        )
        # When a batch has several micro-batches, llama.cpp drops old cells of a window for the last
        # one before the first is computed (prepare and apply_ubatch of llama-kv-cache.cpp). If
        # cells of several sequences are mixed, the first still needs some of them, and logits are
        # off by 0.1 to 1. With one micro-batch per pass nothing is dropped too early.
        if self.n_swa and self.n_seq_max > 1:
            self.n_batch = self.n_ubatch
        self._batch = Batch(self.n_batch)
        self._positions, self._sharing, self.log_sum_exp = (
            Positions(self.n_seq_max),
            Sharing(),
            LogSumExp(),
        )
        self._rows: dict[int, Row] = {}  # by address, of which there are few
        # plain addresses: creating a ctypes pointer for each token is slow right after a pass
        self._address, self._logits = (
            address(pointer),
            LOGITS_ITH(address(library.llama_get_logits_ith)),
        )

    def decode(self, rows: Rows) -> list[Row]:
        """Compute one forward pass. Return the rows that asked for logits, in order.

        Raises NoSlot (nothing changed), Aborted (cut the sequences back), and UserError when
        llama.cpp fails.
        """
        self._check(rows)
        added = spans(rows.positions, rows.sequences)
        self._batch.fill(rows)
        self._forward(self._batch, added)
        if (
            len(rows) == 1 and rows.wants[0]
        ):  # the most frequent case: less code runs right after a pass
            return [self.row(0)]
        result = [self.row(index) for index, wanted in enumerate(rows.wants) if wanted]
        if not result:
            lib().llama_synchronize(
                self.pointer
            )  # on a GPU decode returns before the pass is complete; reading a row waits for it
        return result

    def prepare(self, rows: Rows) -> Callable[[], None]:
        """Check and lay out a pass in advance. Return a function that runs only llama.cpp, for
        measurements.
        """
        self._check(rows)
        batch = Batch(len(rows))
        batch.fill(rows)
        return partial(self._measured, batch, spans(rows.positions, rows.sequences))

    def _measured(self, batch: Batch, added: Collection[Span]) -> None:
        self._forward(batch, added)
        lib().llama_synchronize(self.pointer)

    def _forward(self, batch: Batch, added: Collection[Span]) -> None:
        self._positions.check(added)
        code = lib().llama_decode(self.pointer, batch.struct)
        self.stop.heard()  # not earlier: Ctrl-C may have come while the batch was filled
        if code == 0:
            self._positions.advance(added)
            return
        if code == 1:
            raise NoSlot
        for sequence, _, _ in added:
            self._reread(sequence)
        if code == 2:
            raise Aborted
        reason = last_words() or "no reason given"
        raise UserError(
            f"llama.cpp could not compute this batch (code {code}): {reason}",
            hint="try a smaller --ctx-size or --ubatch-size",
        )

    def row(self, index: int) -> Row:
        """Return the logits of row `index` of the last batch."""
        address = self._logits(self._address, index)
        assert address, f"row {index} has no logits"
        row = self._rows.get(address)
        if row is None:
            row = self._rows[address] = Row(self, address)
        row.index = index
        return row

    def use_threads(self, count: int, batch: int) -> None:
        """Set the threads of later passes: of passes with one row, and of those with several."""
        assert count > 0 and batch > 0, (count, batch)
        lib().llama_set_n_threads(self.pointer, count, batch)

    def interrupt(self) -> None:
        """Make the running forward pass, or else the next one, raise Aborted within milliseconds.

        Safe from a signal handler.
        """
        self.stop.ask()

    def _check(self, rows: Rows) -> None:
        if not self.memory:
            raise no_cache(self._diffuses)
        count = len(rows)
        assert 0 < count <= self.n_batch, (count, self.n_batch)
        assert len(rows.positions) == len(rows.sequences) == len(rows.wants) == count
        wanted = sum(rows.wants)
        assert wanted <= self.n_outputs, "more outputs than the context was made for"
        self._most_outputs = max(self._most_outputs, wanted)
        low, high = ends(rows.tokens)
        assert low >= 0 and high < self.n_vocab, "token outside the vocabulary"
        low, high = ends(rows.sequences)
        assert low >= 0 and high < self.n_seq_max, "sequence id out of range"

    # The memory interface of the ledger. All ids are checked, because llama.cpp aborts on one out
    # of range.

    def trim(self, sequence: int, keep: int) -> bool:
        """Drop positions from `keep` on. Return False, with nothing changed, when this memory
        cannot be cut there.

        A sliding window that has moved on cannot, when the token at `keep` would miss cells of its
        window.
        """
        self._known(sequence)
        assert keep >= 0, keep
        if keep >= self._positions.length(sequence):
            return True
        if self.n_swa and keep and self.first(sequence) > max(0, keep + 1 - self.n_swa):
            return False
        if not lib().llama_memory_seq_rm(self.memory, sequence, keep, -1):
            return False
        self._positions.put(sequence, keep)
        self._sharing.cut(sequence, keep)
        return True

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target`, which ends at `start`, share the cells of `source` from there to `end`.

        Onto a longer sequence llama.cpp would write positions twice. With separate cells per
        sequence, or recurrent state, only a whole sequence can be copied onto an empty one.
        """
        self._known(source, target)
        assert source != target and 0 <= start < end <= self._positions.length(source), (
            source,
            target,
            start,
            end,
        )
        assert self._positions.length(target) == start, f"sequence {target} does not end at {start}"
        needs_whole = self.recurrent or not self.unified
        assert not needs_whole or (start == 0 and end == self._positions.length(source)), (
            "only a whole sequence"
        )
        lib().llama_memory_seq_cp(
            self.memory, source, target, -1 if needs_whole else start, -1 if needs_whole else end
        )
        self._positions.put(target, end)
        if self.unified:
            self._sharing.copied(source, target, start, end)

    @cached_property
    def can_shift(self) -> bool:
        """Return whether cells can be moved to other positions; the first call may run a trial
        (shift_support.py).
        """
        return self._ask_shift is not None and self._ask_shift(
            lib().llama_n_threads_batch(self.pointer)
        )

    def shift(self, sequence: int, start: int, end: int, last: int) -> None:
        """Drop the positions from `start` to `end` and move the later ones down to `start`, with
        rotated keys.

        `last` is the token at the last position. It is computed again at its new position, because
        llama.cpp rotates keys only within a pass; that pass cannot be interrupted. No other
        sequence may hold the cells that move.

        Raises UserError when the pass fails; the whole memory is empty then.
        """
        self._known(sequence)
        assert self.can_shift, "this memory cannot move cells"
        length = self._positions.length(sequence)
        assert 0 <= start < end < length, (start, end, length)
        assert end >= self._sharing.end(sequence), "cells that another sequence holds would move"
        first = self.first(sequence) if self.n_swa else 0
        assert window_moves(first, start, end, length, self.n_swa), "the window would have a hole"
        assert 0 <= last < self.n_vocab, last
        library, new_length = lib(), length - (end - start)
        library.llama_memory_seq_rm(self.memory, sequence, start, end)
        library.llama_memory_seq_add(self.memory, sequence, end, length, start - end)
        library.llama_memory_seq_rm(self.memory, sequence, new_length - 1, -1)
        self._batch.fill(Rows([last], [new_length - 1], [sequence], [False]))
        listen()
        library.llama_set_abort_callback(self.pointer, *abort_on(NEVER))
        code = library.llama_decode(self.pointer, self._batch.struct)
        library.llama_synchronize(self.pointer)
        library.llama_set_abort_callback(self.pointer, *abort_on(self.stop.flag))
        self._sharing.cut(sequence, start)
        self._positions.put(sequence, new_length)
        if code or "K-shift" in last_words():
            self.clear()
            reason = last_words() or "no reason given"
            raise UserError(
                f"llama.cpp could not move the cells of the context (code {code}): {reason}",
                hint="try again: the context is recomputed; --on-full stop avoids moving cells",
            )

    def first(self, sequence: int) -> int:
        """Return the oldest position still held (above 0 when a sliding window has moved on), −1
        when empty.
        """
        self._known(sequence)
        return int(lib().llama_memory_seq_pos_min(self.memory, sequence))

    def last(self, sequence: int) -> int:
        """Return the newest position held, −1 when empty."""
        self._known(sequence)
        return int(lib().llama_memory_seq_pos_max(self.memory, sequence))

    def clear(self) -> None:
        """Empty all sequences; the bytes are not wiped."""
        lib().llama_memory_clear(self.memory, False)
        self._positions.clear()
        self._sharing.clear()

    def state(self, sequence: int, start: int = 0) -> memoryview:
        """Return the state of a sequence, for `write_state`. With `start` only the positions from
        there on are returned; the earlier ones are dropped, and the sequence must be emptied.
        """
        self._known(sequence)
        assert 0 <= start < max(1, self._positions.length(sequence)), start
        if start:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, start)
        return sequence_state.take(
            self.pointer, sequence, self.appends and self._positions.scattered(sequence)
        )

    def put_state(
        self, sequence: int, kept: bytes | memoryview, start: int = 0, source: int = -1
    ) -> bool:
        """Restore a state from `read_state` into new cells of a sequence, and share the first
        `start` positions of `source`. Return False, with the sequence empty, when it fails.
        """
        self._known(sequence)
        self._empty(sequence)  # for the state of an empty sequence llama.cpp keeps the old cells
        good = sequence_state.put(self.pointer, sequence, kept)
        if good and start:
            assert self.unified and not self.recurrent and source != sequence, (source, sequence)
            assert start <= self._positions.length(source), (source, start)
            lib().llama_memory_seq_cp(self.memory, source, sequence, 0, start)
            self._sharing.copied(source, sequence, 0, start)
        if good:
            self._reread(sequence)
        else:
            self._empty(sequence)
        return good

    def append_state(self, sequence: int, kept: memoryview, start: int) -> bool:
        """Append positions that another context computed to the `start` positions of a sequence.
        Return False, with the sequence unchanged, when it fails.
        """
        self._known(sequence)
        assert self.appends and start == self._positions.length(sequence), (
            start,
            self._positions.length(sequence),
        )
        good = sequence_state.append(
            self.pointer, self.memory, sequence, self.n_seq_max, kept, start > 0
        )
        self._positions.put(sequence, self.last(sequence) + 1)
        return good

    def _empty(self, sequence: int) -> None:
        lib().llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self._positions.put(sequence, 0)
        self._sharing.cut(sequence, 0)

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output buffer: a row of logits per sequence, or as many as a pass
        has asked for (llama_context::output_reserve grows it; llama.cpp's memory breakdown leaves
        it out).
        """
        return 4 * self.n_vocab * self._most_outputs

    def allocated(self) -> Allocated | None:
        """Return the bytes that llama.cpp allocated, or None when this build cannot be queried."""
        return allocated(self.pointer)

    def _known(self, *sequences: int) -> None:
        assert all(0 <= sequence < self.n_seq_max for sequence in sequences), (
            sequences,
            self.n_seq_max,
        )

    def _reread(self, sequence: int) -> None:
        """Read the length of a sequence from llama.cpp after a pass that ended early.

        When a window lost all its cells to that pass, llama.cpp reports an empty sequence although
        dense layers keep cells. The rest of the sequence is dropped; otherwise later tokens would
        be stored beside older ones of the same position.
        """
        length = self.last(sequence) + 1
        if not length:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, -1)
        self._positions.put(sequence, length)
        self._sharing.cut(sequence, length)
