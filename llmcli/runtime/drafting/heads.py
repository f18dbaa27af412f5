"""Drafts with heads that were trained for the model (draft_files/heads_file.py): from the final hidden state of
the last token that the model has computed, each head guesses one token after the next.

The guesses are the likeliest tokens of each head, and all heads are computed at once. In a tree, the
guesses of a head follow each guess of the head before. The model checks them as every draft, so the
answer does not change.

Sources: Medusa (Cai et al. 2024), here with exact instead of typical acceptance; blockwise parallel
decoding (Stern et al. 2018).
"""

from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import ClassVar

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.drafting.draft_files.head_graph import Floats, HeadGraph
from llmcli.runtime.drafting.draft_files.heads_file import BLOCKWISE, MEDUSA
from llmcli.runtime.drafting.gain.acceptance import MAX_RANKS, Acceptance
from llmcli.runtime.drafting.gain.pass_cost import average_seconds
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, choose_shape
from llmcli.runtime.drafting.guesses.candidates import Candidates, fill_shape
from llmcli.runtime.drafting.guesses.pass_rows import find_text_rows
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence

MEASUREMENTS = 3  # of the seconds of a draft when the heads are opened; the least counts


class HeadDrafter:
    """A drafter with the heads of a file."""

    name: ClassVar[str] = MEDUSA
    order: ClassVar[int] = 17
    draws: ClassVar[bool] = False

    def __init__(self, target: Context, graph: HeadGraph) -> None:
        self.target, self.graph = target, graph
        self.n_heads = graph.shapes.n_heads
        self.acceptance = Acceptance()
        self.rows: BatchRows | None = None  # of the last pass of the model
        self.failure: UserError | None = None
        # seconds of a draft by its number of guesses
        self.seconds = {count: self._measure(count) for count in {1, self.n_heads}}
        target.on_computed = self.observe

    @classmethod
    def create(cls, resources: DrafterResources) -> "HeadDrafter | None":
        """Create the drafter. Return None when there are no heads of its method."""
        if resources.heads is None or resources.heads[1].shapes.method != cls.name:
            return None
        return cls(*resources.heads)

    def start(self, request: Request, seed: int) -> "HeadDrafts":
        """Return the state for a new answer. Statistics of earlier answers are reused."""
        return HeadDrafts(self)

    def _measure(self, count: int) -> float:
        """Return the seconds of a draft of `count` guesses."""
        state, seconds = self.graph.zero_state(), []
        for _ in range(MEASUREMENTS):
            start_time = perf_counter()
            self.graph.guess(state, count)
            seconds.append(perf_counter() - start_time)
        return min(seconds)

    def observe(self, rows: BatchRows) -> None:
        """Remember the rows of a pass of the model."""
        self.rows = rows

    def find_state(self, sequence: Sequence) -> Floats | None:
        """Return the final hidden state of the token before the last one, from which the model has
        chosen the last one. Return None when the last pass has not computed it.
        """
        rows, position = self.rows, len(sequence.tokens) - 2
        if rows is None or position < 0:
            return None
        for row in find_text_rows(rows, sequence):
            if rows.positions[row] == position:
                return self.target.final_state(row)
        return None

    def expected_seconds(self, count: int) -> float:
        """Return the expected seconds of a draft of `count` guesses: measured, or on the line
        through one guess and a guess of every head.
        """
        if count in self.seconds:
            return self.seconds[count]
        first, last = self.seconds[1], self.seconds[self.n_heads]
        return first + (last - first) * (count - 1) / (self.n_heads - 1)

    def record_seconds(self, count: int, seconds: float) -> None:
        """Update the expected seconds of a draft of `count` guesses."""
        self.seconds[count] = average_seconds(self.expected_seconds(count), seconds)


class BlockwiseDrafter(HeadDrafter):
    """A drafter with blockwise heads, which differ only in their layers (draft_files/head_graph.py)."""

    name: ClassVar[str] = BLOCKWISE
    order: ClassVar[int] = 18


class HeadDrafts:
    """The guesses of heads for one answer."""

    def __init__(self, drafter: HeadDrafter) -> None:
        self.drafter = drafter
        self.state: Floats | None = None
        self.n_ranks = 1  # guesses of one token that a draft may have

    def follow(self, sequence: Sequence) -> None:
        self.state = self.drafter.find_state(sequence)
        self.drafter.acceptance.forget()

    def on_context_shift(self) -> None:
        """Forget the state, whose token has moved."""
        self.state = None

    def shape(self, limits: ShapeLimits) -> TreeShape:
        if self.state is None or self.drafter.failure:
            return TreeShape()
        self.n_ranks = min(MAX_RANKS, limits.n_branches)
        n_depths = max(0, min(limits.n_depths, limits.n_nodes, self.drafter.n_heads))
        chances = self.drafter.acceptance.chances(n_depths, self.n_ranks)
        return choose_shape(chances, limits, extends_all=True)

    def cost_seconds(self, n_depths: int) -> float:
        return self.drafter.expected_seconds(n_depths)

    def reading_seconds(self) -> float:
        """Return 0: the heads read only the hidden state of the last pass."""
        return 0.0

    def draft(self, shape: TreeShape) -> Draft:
        """Return the likeliest tokens of the heads, which are independent of each other. The draft
        is empty if ggml fails.
        """
        assert self.state is not None
        start_time, n_depths = perf_counter(), shape.n_depths
        try:
            guesses = self.drafter.graph.guess(self.state, n_depths, self.n_ranks)
        except UserError as error:
            self.drafter.failure = error
            return Draft()
        self.drafter.record_seconds(n_depths, perf_counter() - start_time)
        return fill_shape(shape, [Candidates(tokens) for tokens in guesses])

    def record_result(self, draft: Draft, tokens: Tokens[int]) -> None:
        self.drafter.acceptance.record(draft.candidates, tokens, extends_all=True)

    def close(self, tokens: Tokens[int]) -> None:
        """Do nothing, because the heads stay open for later answers."""


DRAFTERS = (HeadDrafter, BlockwiseDrafter)
