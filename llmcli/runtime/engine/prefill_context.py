"""A second context with flash attention that computes prompts, while answers are computed in the
decoding context, which has none.

On some CPUs ggml's flash attention makes prompts faster and answers slower. It computes prompts in
tiles of 64 rows, and answers row by row (ggml-cpu/ops.cpp, use_tiled;
planning/measurements/flash_attention_probe.py measures both). Moving computed cells takes a small part of the
time of computing them. In a separate context a prompt is also not slowed down by the cells of
running answers, all of which llama.cpp visits for each row.

A slot has the same number in both contexts. Cells of the prefill context may be dropped at any
time, because they are also in the decoding context.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Aborted, Context, NoSlot
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kv_state.state_slicing import transpose_values
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.binding.rows.logits_row import LogitsRow
from llmcli.runtime.binding.trials.state_trial import can_move_states
from llmcli.runtime.engine.forward_pass import TILE_ROWS, ForwardPass, SequenceRows
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.requests.request import RunOptions

# minimum rows of a prompt; for fewer, moving the cells may take longer than flash attention saves
MIN_ROWS = 48
# maximum cells of the prefill context; longer prompts are computed in the decoding context
MAX_CELLS = 4096
# rows of a micro-batch of the decoding context; these are few, because without flash attention the
# attention scores of all its rows are in memory at once
DECODE_UBATCH_ROWS = 128


def prefill_options(decode_options: ContextOptions, options: RunOptions) -> ContextOptions:
    """Return the options of the prefill context. `decode_options`: those of the decoding context.
    `options`: those of the model run.
    """
    return replace(
        decode_options,
        n_ctx=options.prefill_cells,
        n_ubatch=options.max_rows,
        flash_attn="on",
        can_append=False,
        has_spare=False,
        outputs_final_states=False,
    )


@contextmanager
def open_prefill_context(
    model: Model, decode_context: Context, decode_options: ContextOptions, options: RunOptions
) -> Iterator["PrefillContext | None"]:
    """Open a prefill context for the decoding context `decode_context`, which must be empty.
    Interrupting one of them interrupts both. Yield None if cells cannot be moved between them,
    because this build of llama.cpp stores states in an unknown format.

    Raises UserError like `open_context`.
    """
    settings = prefill_options(decode_options, options)
    with ExitStack() as stack:
        context = stack.enter_context(open_context(model, settings, stop=decode_context.stop))
        decode_context.reads_pool = can_move_states(context, decode_context)
        if not decode_context.reads_pool:
            stack.close()
        yield PrefillContext(context, decode_context) if decode_context.reads_pool else None


class PrefillContext:
    """Computes prompts in the prefill context `context`, and moves their cells to
    `decode_context`.
    """

    def __init__(self, context: Context, decode_context: Context) -> None:
        self.context, self.decode_context = context, decode_context
        self._cached_tokens: list[list[int]] = [[] for _ in range(decode_context.n_seq_max)]

    @property
    def nbytes(self) -> int | None:
        """Return the bytes of the prefill context's cache and buffers. Return None when this build
        of llama.cpp does not report them.
        """
        allocated = self.context.memory_breakdown()
        return (
            None
            if allocated is None
            else allocated.context_bytes + allocated.compute_bytes + self.context.output_bytes
        )

    def can_compute(self, plan: ForwardPass) -> bool:
        """Return whether the prefill context should compute a pass. The pass must contain only
        prompts that fit into it, and at least one of them must be long enough.
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
        """Compute a pass and move its cells to the decoding context. Return the rows of logits, in
        the order of the pass.

        Raises NoSlot when the decoding context has no room for the cells, and Aborted and UserError
        like `Context.decode`. The decoding context is then unchanged.
        """
        rows = self._prepare_rows(plan)
        try:
            rows_with_logits = self.context.decode(rows)
        except (Aborted, NoSlot, UserError):  # parts of the pass may be in the prefill cache
            for share in plan.shares:
                self._cut(share.sequence.slot, 0)
            raise
        for share in plan.shares:
            self._cached_tokens[share.sequence.slot] = share.sequence.tokens[
                : share.sequence.n_computed + share.tokens
            ]
        moved: list[SequenceRows] = []
        for share in plan.shares:
            if not self._move_cells(share):
                for earlier in moved:
                    self.decode_context.trim(earlier.sequence.slot, earlier.sequence.n_computed)
                raise NoSlot
            moved.append(share)
        return rows_with_logits

    def _prepare_rows(self, plan: ForwardPass) -> BatchRows:
        """Fill the slots with the prefixes that the pass continues, and return the rows to compute.
        A single prompt with fewer rows than a tile also gets the rows of earlier tokens, because a
        full tile is computed faster.
        """
        starts = [
            self._first_computed(share, is_single=len(plan.shares) == 1) for share in plan.shares
        ]
        self._make_room(plan, starts)
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wants: list[bool] = []
        first_row = 0
        for share, start in zip(plan.shares, starts, strict=True):
            sequence, n_computed = share.sequence, share.sequence.n_computed
            end, end_row = n_computed + share.tokens, first_row + share.tokens
            self._fill_slot(sequence.slot, sequence.tokens[:n_computed], start)
            tokens += sequence.tokens[start:end]
            positions += range(start, end)
            sequences += [sequence.slot] * (end - start)
            wants += [False] * (n_computed - start) + list(plan.wants_logits[first_row:end_row])
            first_row = end_row
        return BatchRows(tokens, positions, sequences, wants)

    def _first_computed(self, share: SequenceRows, is_single: bool) -> int:
        """Return the index of the first token of a sequence that is computed in this pass.
        `is_single`: whether the pass has only this sequence.
        """
        start = share.sequence.n_computed
        return max(0, min(start, start + share.tokens - TILE_ROWS)) if is_single else start

    def _make_room(self, plan: ForwardPass, starts: Sequence[int]) -> None:
        """Cut every slot to the prefix that the pass continues there, so that there is room before
        other slots are filled. `starts`: for each sequence of the pass, the index of the first
        token that is computed.
        """
        pairs = zip(plan.shares, starts, strict=True)
        prefixes = {share.sequence.slot: share.sequence.tokens[:start] for share, start in pairs}
        for slot, cached in enumerate(self._cached_tokens):
            prefix = prefixes.get(slot, [])
            if cached:
                self._cut(slot, len(prefix) if common_prefix(cached, prefix) == len(prefix) else 0)

    def _fill_slot(self, slot: int, tokens: Sequence[int], count: int) -> None:
        """Make a slot contain the first `count` of `tokens`. If it has fewer, their cells are
        copied from the decoding context.
        """
        if len(self._cached_tokens[slot]) < count:
            is_written = self.context.write_state(
                slot, transpose_values(self.decode_context.read_state(slot))
            )
            assert is_written, "_make_room has cut the cells that this pass does not need"
            self._cached_tokens[slot] = list(tokens)
            self._cut(slot, count)

    def _move_cells(self, share: SequenceRows) -> bool:
        """Append the computed cells of a sequence to its slot in the decoding context. Return False
        when there is no room.
        """
        sequence, start = share.sequence, share.sequence.n_computed
        return self.decode_context.append_state(
            sequence.slot, transpose_values(self.context.read_state(sequence.slot), start), start
        )

    def _cut(self, slot: int, count: int) -> None:
        """Cut a slot of the prefill context to its first `count` tokens."""
        is_cut = self.context.trim(slot, count)
        assert is_cut, "a memory that cannot be cut"
        del self._cached_tokens[slot][count:]
