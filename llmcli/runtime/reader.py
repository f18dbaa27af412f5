"""Prompts read in a context of their own, with flash attention, for answers that go on in one
without it.

Some CPUs read prompts in half the time with ggml's flash attention and answers in twice
(hardware/attention.py asks): passes of 64 rows and more go by tiles, fewer row by row
(ggml-cpu/ops.cpp, use_tiled). SmolLM2-135M, two threads of a Xeon, behind 512 tokens each: 512 rows
0.47 s with it and 1.03 without; a pass of one, four, eight, sixteen answers 20, 53, 98, 203 ms with
it and 12, 36, 76, 251 without. Four users with prompts of 530 tokens and answers of 96: 42 tokens a
second, so 61 (2026-11-22). To move what was computed is 20 to 40 µs a token, computing it 900. And
answers that go on are in nobody's way: llama.cpp looks at all cells of a context for each row.

A slot has the same number in both. What is here may be forgotten at any time: the pool of the
answers has all of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llmcli.errors import UserError
from llmcli.runtime.binding.carved import turned
from llmcli.runtime.binding.context import (
    Aborted,
    Context,
    ContextOptions,
    NoSlot,
    Rows,
    open_context,
)
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.row import Row
from llmcli.runtime.likeness import common
from llmcli.runtime.passes import TILE, Pass, Share
from llmcli.runtime.request import RunOptions

LEAST = (
    48  # rows of a prompt that are worth the moves: into cells that lie apart they take up to 40 ms
)
CELLS = 4096  # of the context that reads, at most: longer texts are read where the answers are
# rows of a micro-batch where the answers are: without flash attention all their scores are written
# out
BESIDE = 128


def reading_options(home: ContextOptions, options: RunOptions) -> ContextOptions:
    """What the context that reads is made with."""
    return replace(
        home, n_ctx=options.reading, n_ubatch=options.rows, flash_attn="on", appends=False
    )


@contextmanager
def opened(
    model: Model, home: Context, made_with: ContextOptions, options: RunOptions
) -> Iterator["Reader"]:
    """Make the context that reads for `home`; what interrupts one interrupts the other. Raises
    UserError as open_context does.
    """
    with open_context(model, reading_options(made_with, options), stop=home.stop) as context:
        yield Reader(context, home)


class Reader:
    """The context that reads, and the one, `home`, in which answers go on."""

    def __init__(self, context: Context, home: Context) -> None:
        self.context, self.home = context, home
        self._held: list[list[int]] = [[] for _ in range(home.n_seq_max)]

    @property
    def nbytes(self) -> int | None:
        """Bytes of its cache and its buffers; None where this build cannot be asked."""
        allocated = self.context.allocated()
        return (
            None
            if allocated is None
            else allocated.context + allocated.compute + self.context.output_bytes
        )

    def takes(self, plan: Pass) -> bool:
        """Whether it is to compute a pass: of prompts alone, one of them long enough, and with room
        for them.
        """
        context, shares = self.context, plan.shares
        return (
            LEAST <= len(plan.tokens) <= context.n_batch
            and max(share.tokens for share in shares) >= LEAST
            and all(share.sequence.prompting and not share.sequence.draft for share in shares)
            and sum(share.sequence.computed + share.tokens for share in shares) <= context.n_ctx
            and sum(plan.wants) <= context.n_outputs
        )

    def read(self, plan: Pass) -> list[Row]:
        """Compute a pass and move its cells home; the rows that wanted logits, in order.

        Raises NoSlot where they find no room at home, and Aborted and UserError as decode does:
        nothing is changed there then.
        """
        rows = self._rows(plan)
        try:
            found = self.context.decode(rows)
        except (Aborted, NoSlot, UserError):  # parts of it may be in the cache
            for share in plan.shares:
                self._cut(share.sequence.slot, 0)
            raise
        for share in plan.shares:
            self._held[share.sequence.slot] = share.sequence.tokens[
                : share.sequence.computed + share.tokens
            ]
        moved: list[Share] = []
        for share in plan.shares:
            if not self._move(share):
                for other in moved:
                    self.home.trim(other.sequence.slot, other.sequence.computed)
                raise NoSlot
            moved.append(share)
        return found

    def _rows(self, plan: Pass) -> Rows:
        """The pass as it is computed here: a rest that is no tile, with so much of what is before
        it that it is one.
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
            start, end = sequence.computed, sequence.computed + share.tokens
            self._hold(sequence.slot, sequence.tokens[:start], begin)
            tokens += sequence.tokens[begin:end]
            positions += range(begin, end)
            sequences += [sequence.slot] * (end - begin)
            wants += [False] * (start - begin) + list(plan.wants[at : at + share.tokens])
            at += share.tokens
        return Rows(tokens, positions, sequences, wants)

    def _begin(self, share: Share, alone: bool) -> int:
        """The first token of a sequence that is computed in a pass."""
        start = share.sequence.computed
        return max(0, min(start, start + share.tokens - TILE)) if alone else start

    def _make_room(self, plan: Pass, begins: Sequence[int]) -> None:
        """Cut every slot back to what the pass begins with, all of them before any is filled from
        home.
        """
        pairs = zip(plan.shares, begins, strict=True)
        wanted = {share.sequence.slot: share.sequence.tokens[:begin] for share, begin in pairs}
        for slot, held in enumerate(self._held):
            stays = len(wanted.get(slot, ()))
            if held:
                self._cut(slot, stays if stays and common(held, wanted[slot]) == stays else 0)

    def _hold(self, slot: int, tokens: Sequence[int], count: int) -> None:
        """Let a slot hold the first `count` of the tokens that it holds at home."""
        if len(self._held[slot]) < count:
            good = self.context.put_state(slot, turned(self.home.state(slot)))
            assert good, "there is room: what the pass does not begin with was cut away"
            self._held[slot] = list(tokens)
            self._cut(slot, count)

    def _move(self, share: Share) -> bool:
        """Put what was computed behind what the slot holds at home; False where there is no room."""
        sequence, start = share.sequence, share.sequence.computed
        return self.home.append_state(
            sequence.slot, turned(self.context.state(sequence.slot), start), start
        )

    def _cut(self, slot: int, count: int) -> None:
        cut = self.context.trim(slot, count)
        assert cut, "a memory that cannot be cut"
        del self._held[slot][count:]
