"""A second context with flash attention that computes prompts, while answers are decoded in a
context without it.

On some CPUs ggml's flash attention halves the time of prompts, which it computes in tiles of 64
rows, and doubles that of answers, which it computes row by row (ggml-cpu/ops.cpp, use_tiled;
planning/flash_attention_probe.py measures it). Moving computed cells costs a small part of
computing them. A prompt in its own context also does not pay for the cells of running answers, all
of which llama.cpp visits for each row.

A slot has the same number in both contexts. Cells of the prefill context may be dropped at any
time, because the pool of the answers holds all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llmcli.errors import UserError
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Aborted, Context, NoSlot
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.logits_row import LogitsRow
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.binding.state_slicing import transpose_values
from llmcli.runtime.engine.forward_pass import TILE_ROWS, ForwardPass, SequenceRows
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.requests.request import RunOptions

# minimum rows of a prompt for which moving cells pays; moving scattered cells takes up to 40 ms
MIN_ROWS = 48
# maximum cells of the prefill context; longer prompts are computed in the decoding context
MAX_CELLS = 4096
# rows of a micro-batch of the decoding context; few, because without flash attention all attention
# scores of a micro-batch are stored
DECODE_UBATCH_ROWS = 128


def prefill_options(home: ContextOptions, options: RunOptions) -> ContextOptions:
    """Return the options of the prefill context, given those of the decoding context (`home`)."""
    return replace(
        home,
        n_ctx=options.prefill_cells,
        n_ubatch=options.max_rows,
        flash_attn="on",
        can_append=False,
    )


@contextmanager
def open_prefill_context(
    model: Model, home: Context, home_options: ContextOptions, options: RunOptions
) -> Iterator["PrefillContext"]:
    """Open the prefill context for the decoding context `home`. Interrupting either context
    interrupts both.

    Raises UserError as `open_context` does.
    """
    with open_context(model, prefill_options(home_options, options), stop=home.stop) as context:
        yield PrefillContext(context, home)


class PrefillContext:
    """A context that computes prompts for the context `decode_context`, in which answers are
    decoded.
    """

    def __init__(self, context: Context, home: Context) -> None:
        self.context, self.decode_context = context, home
        self._held: list[list[int]] = [[] for _ in range(home.n_seq_max)]

    @property
    def nbytes(self) -> int | None:
        """Return the bytes of the prefill context's cache and buffers, or None when this build of
        llama.cpp cannot be queried.
        """
        allocated = self.context.memory_breakdown()
        return (
            None
            if allocated is None
            else allocated.context_bytes + allocated.compute_bytes + self.context.output_bytes
        )

    def can_compute(self, plan: ForwardPass) -> bool:
        """Return whether the prefill context should compute this pass: it has only prompts, at
        least one of them is long enough, and all of them fit.
        """
        context, shares = self.context, plan.shares
        return (
            MIN_ROWS <= len(plan.tokens) <= context.n_batch
            and max(share.tokens for share in shares) >= MIN_ROWS
            and all(share.sequence.is_prefilling and not share.sequence.draft for share in shares)
            and sum(share.sequence.n_computed + share.tokens for share in shares) <= context.n_ctx
            and sum(plan.wants_logits) <= context.n_outputs
        )

    def compute(self, plan: ForwardPass) -> list[LogitsRow]:
        """Compute a pass and move its cells to the decoding context. Return the rows that asked for
        logits, in order.

        Raises NoSlot when the decoding context has no room, and Aborted and UserError as `decode`
        does; the decoding context is unchanged then.
        """
        rows = self._rows(plan)
        try:
            rows_with_logits = self.context.decode(rows)
        except (Aborted, NoSlot, UserError):  # parts of the pass may be in the prefill cache
            for share in plan.shares:
                self._cut(share.sequence.slot, 0)
            raise
        for share in plan.shares:
            self._held[share.sequence.slot] = share.sequence.tokens[
                : share.sequence.n_computed + share.tokens
            ]
        moved: list[SequenceRows] = []
        for share in plan.shares:
            if not self._move(share):
                for earlier in moved:
                    self.decode_context.trim(earlier.sequence.slot, earlier.sequence.n_computed)
                raise NoSlot
            moved.append(share)
        return rows_with_logits

    def _rows(self, plan: ForwardPass) -> BatchRows:
        """Fill the slots that the pass continues, and return the rows to compute. A single prompt with
        fewer rows than a tile gets rows of earlier tokens, too, to fill the tile.
        """
        begins = [self._begin(share, alone=len(plan.shares) == 1) for share in plan.shares]
        self._make_room(plan, begins)
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wants: list[bool] = []
        at = 0
        for share, begin in zip(plan.shares, begins, strict=True):
            sequence = share.sequence
            start, end = sequence.n_computed, sequence.n_computed + share.tokens
            self._hold(sequence.slot, sequence.tokens[:start], begin)
            tokens += sequence.tokens[begin:end]
            positions += range(begin, end)
            sequences += [sequence.slot] * (end - begin)
            wants += [False] * (start - begin) + list(plan.wants_logits[at : at + share.tokens])
            at += share.tokens
        return BatchRows(tokens, positions, sequences, wants)

    def _begin(self, share: SequenceRows, alone: bool) -> int:
        """Return the index of a sequence's first token that is computed in this pass."""
        start = share.sequence.n_computed
        return max(0, min(start, start + share.tokens - TILE_ROWS)) if alone else start

    def _make_room(self, plan: ForwardPass, begins: Sequence[int]) -> None:
        """Cut every slot to the prefix that the pass needs, so that there is room before a slot is
        filled from the decoding context.
        """
        pairs = zip(plan.shares, begins, strict=True)
        wanted = {share.sequence.slot: share.sequence.tokens[:begin] for share, begin in pairs}
        for slot, cached in enumerate(self._held):
            stays = len(wanted.get(slot, ()))
            if cached:
                self._cut(
                    slot, stays if stays and common_prefix(cached, wanted[slot]) == stays else 0
                )

    def _hold(self, slot: int, tokens: Sequence[int], count: int) -> None:
        """Make a slot hold the first `count` of `tokens`. If it has fewer, its cells are copied
        from the decoding context.
        """
        if len(self._held[slot]) < count:
            good = self.context.write_state(
                slot, transpose_values(self.decode_context.read_state(slot))
            )
            assert good, "the cells that this pass does not need were cut before"
            self._held[slot] = list(tokens)
            self._cut(slot, count)

    def _move(self, share: SequenceRows) -> bool:
        """Append the computed cells to the slot in the decoding context. Return False when there is
        no room.
        """
        sequence, start = share.sequence, share.sequence.n_computed
        return self.decode_context.append_state(
            sequence.slot, transpose_values(self.context.read_state(sequence.slot), start), start
        )

    def _cut(self, slot: int, count: int) -> None:
        cut = self.context.trim(slot, count)
        assert cut, "a memory that cannot be cut"
        del self._held[slot][count:]
