"""One llama.cpp context: the KV cache and the forward pass.

Every check that keeps llama.cpp from aborting the process stands here, before the call
(src/llama-context.cpp, src/llama-batch.cpp, src/llama-kv-cache.cpp). It counts positions only
to check them (positions.py); which cells hold which tokens is the ledger's.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding import state
from llmcli.runtime.binding.batch import (
    LOGITS_ITH,
    NEVER,
    Batch,
    Stop,
    abort_on,
    address,
    no_cache,
    reserved,
)
from llmcli.runtime.binding.cache_types import FLASH, KV_TYPES, check_cache
from llmcli.runtime.binding.library import last_words, lib, listen
from llmcli.runtime.binding.memory import Allocated, allocated
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.positions import Positions, Span, ends, spans, window_moves
from llmcli.runtime.binding.row import Row
from llmcli.runtime.binding.sharing import Sharing
from llmcli.runtime.binding.softmax import LogSumExp
from llmcli.runtime.binding.turning import can_shift
from llmcli.runtime.interrupt import on_interrupt

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What a context is made with; sizes in tokens. `unified` is one pool of cells, otherwise each
    sequence has its own `n_ctx` / `n_seq_max`. `n_outputs` rows of logits a pass may ask for, where
    that is more than one a sequence. `whole`: windows keep every cell, in order, and nothing is
    lent to a GPU. `appends`: what another context computed can be put behind what a sequence holds.
    """

    n_ctx: int
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 1
    n_threads_batch: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    unified: bool = True
    n_outputs: int = 1
    whole: bool = False
    appends: bool = False

    @property
    def sequences(self) -> int:
        """Those that llama.cpp is to have: one more to hold on to the beginning of one whose end is
        put.
        """
        return self.n_seq_max + self.appends


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward pass: token, position, sequence, and whether its logits are wanted."""

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[int]
    wants: Sequence[bool]

    def __len__(self) -> int:
        return len(self.tokens)


class Aborted(Exception):
    """The forward pass was interrupted; every sequence of the batch must be cut back to where it
    was.
    """


class NoSlot(Exception):
    """The KV cache had no room for the batch; nothing was changed."""


class Context:
    """An open context. Made by `open_context`; unusable after its `with` block."""

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
        # Cells that moved up stay what they became behind what is gone: not what the text alone
        # would give.
        self._ask_shift = (
            None if options.whole else partial(can_shift, model, self.memory, options.type_k)
        )
        # Laying out a batch of several micro-batches, llama.cpp drops old cells of a window for the
        # last of them before the first is computed (prepare and apply_ubatch of
        # llama-kv-cache.cpp); where sequences' cells lie mixed, some that the first still sees:
        # logits off by 0.1 to 1. One micro-batch a pass has nothing to drop too early.
        if self.n_swa and self.n_seq_max > 1:
            self.n_batch = self.n_ubatch
        self._batch = Batch(self.n_batch)
        self._positions, self._sharing, self.log_sum_exp = (
            Positions(self.n_seq_max),
            Sharing(),
            LogSumExp(),
        )
        self._rows: dict[int, Row] = {}  # by address, of which there are few
        # Plain addresses: a ctypes pointer object made anew for each token costs 15 µs of cold
        # code.
        self._address, self._logits = (
            address(pointer),
            LOGITS_ITH(address(library.llama_get_logits_ith)),
        )

    def decode(self, rows: Rows) -> list[Row]:
        """One forward pass; the rows that wanted logits, in order.

        Raises NoSlot (nothing changed) and Aborted (cut the sequences back). Anything else that
        llama.cpp refuses is our bug and crashes.
        """
        self._check(rows)
        added = spans(rows.positions, rows.sequences)
        self._batch.fill(rows)
        self._forward(self._batch, added)
        if (
            len(rows) == 1 and rows.wants[0]
        ):  # as nearly always, and behind a pass each line must be fetched
            return [self.row(0)]
        found = [self.row(index) for index, wanted in enumerate(rows.wants) if wanted]
        if not found:
            lib().llama_synchronize(
                self.pointer
            )  # on a GPU decode returns before it is done; asking for a row waits
        return found

    def prepare(self, rows: Rows) -> Callable[[], None]:
        """The same pass checked and laid out beforehand: what is left to call is llama.cpp alone,
        for measuring it.
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
        self.stop.heard()  # not before: Ctrl-C may have come while the batch was filled
        if code == 0:
            self._positions.advance(added)
            return
        if code == 1:
            raise NoSlot
        for sequence, _, _ in added:
            self._reread(sequence)
        if code == 2:
            raise Aborted
        raise UserError(
            f"llama.cpp could not compute this batch (code {code}): {last_words() or 'no reason given'}",
            hint="try a smaller --ctx-size or --ubatch-size",
        )

    def row(self, index: int) -> Row:
        """The logits of row `index` of the last batch."""
        address = self._logits(self._address, index)
        assert address, f"row {index} has no logits"
        row = self._rows.get(address)
        if row is None:
            row = self._rows[address] = Row(self, address)
        row.index = index
        return row

    def use_threads(self, count: int, batch: int) -> None:
        """From the next pass on compute with as many threads: one row at a time, and several."""
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

    # What the ledger asks of a memory. All ids are checked: llama.cpp aborts on one out of range.

    def trim(self, sequence: int, keep: int) -> bool:
        """Drop positions from `keep` on. False where this kind of memory cannot: nothing changed,
        clear and recompute.

        A sliding window that has moved on is such a memory: the token at `keep` would miss some
        that it has to see.
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
        """Let `target`, which ends at `start`, share the cells of `source` from there up to `end`.

        Onto a longer sequence llama.cpp would write positions that are there already. Where each
        sequence has cells of its own, or state that is not kept by position, only a whole one can
        be copied onto an empty one.
        """
        self._known(source, target)
        assert source != target and 0 <= start < end <= self._positions.length(source), (
            source,
            target,
            start,
            end,
        )
        assert self._positions.length(target) == start, f"sequence {target} does not end at {start}"
        whole = self.recurrent or not self.unified
        assert not whole or (start == 0 and end == self._positions.length(source)), (
            "only a whole sequence"
        )
        lib().llama_memory_seq_cp(
            self.memory, source, target, -1 if whole else start, -1 if whole else end
        )
        self._positions.put(target, end)
        if self.unified:
            self._sharing.copied(source, target, start, end)

    @cached_property
    def can_shift(self) -> bool:
        """Whether cells may be moved to other positions; the first question is answered by trying
        (turning.py).
        """
        return self._ask_shift is not None and self._ask_shift(
            lib().llama_n_threads_batch(self.pointer)
        )

    def shift(self, sequence: int, start: int, end: int, last: int) -> None:
        """Give up the positions from `start` to `end` and move what follows down to `start`, its
        keys turned along.

        `last` is the token at the last position. It is computed anew at its new place, since
        llama.cpp turns the keys only within a pass; that one is not interrupted. No other sequence
        may hold the cells that move. Raises UserError where the pass fails; the whole memory is
        empty then.
        """
        self._known(sequence)
        assert self.can_shift, "this memory cannot move cells"
        length = self._positions.length(sequence)
        assert 0 <= start < end < length, (start, end, length)
        assert end >= self._sharing.end(sequence), "cells that another sequence holds would move"
        first = self.first(sequence) if self.n_swa else 0
        assert window_moves(first, start, end, length, self.n_swa), "the window would have a hole"
        assert 0 <= last < self.n_vocab, last
        library, behind = lib(), length - (end - start)
        library.llama_memory_seq_rm(self.memory, sequence, start, end)
        library.llama_memory_seq_add(self.memory, sequence, end, length, start - end)
        library.llama_memory_seq_rm(self.memory, sequence, behind - 1, -1)
        self._batch.fill(Rows([last], [behind - 1], [sequence], [False]))
        listen()
        library.llama_set_abort_callback(self.pointer, *abort_on(NEVER))
        code = library.llama_decode(self.pointer, self._batch.struct)
        library.llama_synchronize(self.pointer)
        library.llama_set_abort_callback(self.pointer, *abort_on(self.stop.flag))
        self._sharing.cut(sequence, start)
        self._positions.put(sequence, behind)
        if code or "K-shift" in last_words():
            self.clear()
            raise UserError(
                f"llama.cpp could not move the context (code {code}): {last_words() or 'no reason given'}",
                hint="ask again: it is computed anew; --on-full stop moves nothing",
            )

    def first(self, sequence: int) -> int:
        """The oldest position still held (above 0 where a sliding window has moved on), −1 when
        empty.
        """
        self._known(sequence)
        return int(lib().llama_memory_seq_pos_min(self.memory, sequence))

    def last(self, sequence: int) -> int:
        """The newest position held, −1 when empty."""
        self._known(sequence)
        return int(lib().llama_memory_seq_pos_max(self.memory, sequence))

    def clear(self) -> None:
        """Forget everything; the bytes are not wiped."""
        lib().llama_memory_clear(self.memory, False)
        self._positions.clear()
        self._sharing.clear()

    def state(self, sequence: int, start: int = 0) -> memoryview:
        """All that is kept of a sequence, for `put_state`; with `start` of its positions from there
        on alone, and the sequence must be emptied then: it has let go of those before.
        """
        self._known(sequence)
        assert 0 <= start < max(1, self._positions.length(sequence)), start
        if start:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, start)
        return state.take(
            self.pointer, sequence, self.appends and self._positions.scattered(sequence)
        )

    def put_state(
        self, sequence: int, kept: bytes | memoryview, start: int = 0, source: int = -1
    ) -> bool:
        """Let a sequence hold what `state` gave, in cells of its own, and the first `start` of
        those that `source` holds; False where it cannot: then it holds nothing.
        """
        self._known(sequence)
        self._empty(
            sequence
        )  # llama.cpp leaves what was there where the state is of an empty sequence
        good = state.put(self.pointer, sequence, kept)
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
        """Put behind the `start` positions of a sequence what another context computed for those
        that follow; False where it cannot: then it holds what it held.
        """
        self._known(sequence)
        assert self.appends and start == self._positions.length(sequence), (
            start,
            self._positions.length(sequence),
        )
        good = state.append(self.pointer, self.memory, sequence, self.n_seq_max, kept, start > 0)
        self._positions.put(sequence, self.last(sequence) + 1)
        return good

    def _empty(self, sequence: int) -> None:
        lib().llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self._positions.put(sequence, 0)
        self._sharing.cut(sequence, 0)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output buffer: a row of logits for each sequence, or as many as a pass has
        asked for (llama_context::output_reserve, which grows it; llama.cpp's accounts leave it
        out).
        """
        return 4 * self.n_vocab * self._most_outputs

    def allocated(self) -> Allocated | None:
        """The bytes llama.cpp really allocated, None where this build cannot be asked."""
        return allocated(self.pointer)

    def _known(self, *sequences: int) -> None:
        assert all(0 <= one < self.n_seq_max for one in sequences), (sequences, self.n_seq_max)

    def _reread(self, sequence: int) -> None:
        """After a pass that ended early: llama.cpp's own count.

        A window that lost all its cells to that pass counts none while the dense layers keep
        theirs; what is left of such a sequence goes, or its next tokens would stand beside older
        ones of the same position.
        """
        length = self.last(sequence) + 1
        if not length:
            lib().llama_memory_seq_rm(self.memory, sequence, 0, -1)
        self._positions.put(sequence, length)
        self._sharing.cut(sequence, length)


@contextmanager
def open_context(
    model: Model, options: ContextOptions, seen: Any = None, stop: Stop | None = None
) -> Iterator[Context]:
    """Make a context for `model`, `seen` by watch.py; what interrupts another one may `stop` this
    one, too. Raises UserError where llama.cpp refuses the settings.
    """
    library = lib()
    _refuse(options)
    params = library.llama_context_default_params()
    params.n_ctx = options.n_ctx
    params.n_batch = max(options.n_batch, options.sequences, options.n_outputs)
    params.n_ubatch = options.n_ubatch
    params.n_seq_max = options.sequences
    # The default reserves a row of logits for every token of a batch: 107 MB instead of 16 on
    # SmolLM2.
    params.n_outputs_max = reserved(max(options.sequences, options.n_outputs))
    params.n_threads, params.n_threads_batch = options.n_threads, options.n_threads_batch
    params.type_k, params.type_v = KV_TYPES[options.type_k], KV_TYPES[options.type_v]
    params.flash_attn_type = FLASH[options.flash_attn]
    params.kv_unified = options.unified
    params.swa_full = options.whole  # llama.cpp's own tools: False
    if options.whole:
        params.op_offload = params.offload_kqv = False
    params.no_perf = True
    if seen is not None:
        params.cb_eval = seen
    stop = stop or Stop()
    params.abort_callback, params.abort_callback_data = abort_on(stop.flag)
    listen()
    stopped = threading.Event()
    with on_interrupt(stopped.set):
        pointer = library.llama_init_from_model(model.pointer, params)
    if stopped.is_set():
        if pointer:
            library.llama_free(pointer)
        raise KeyboardInterrupt
    if not pointer:
        raise UserError(
            f"llama.cpp refuses this context: {last_words() or 'not enough memory?'}",
            hint="try a smaller --ctx-size, or --cache-type-k f16 --cache-type-v f16",
        )
    context = Context(pointer, model, stop, options)
    try:
        yield context
    finally:
        library.llama_free(pointer)


def _refuse(options: ContextOptions) -> None:
    check_cache(options.type_k, options.type_v, options.flash_attn)
    if not 1 <= options.n_seq_max <= options.sequences <= MAX_SEQUENCES:
        raise UserError(
            f"{options.n_seq_max} sequences at once", hint=f"between 1 and {MAX_SEQUENCES}"
        )
