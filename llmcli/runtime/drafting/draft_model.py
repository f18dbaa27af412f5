"""Drafts with a second, smaller model of the same vocabulary (the draft model), which guesses token
after token in a separate context.

The context caches the text of one answer. Before guessing, the drafter drops wrong guesses from the
cache and computes the new tokens of the text. For a greedy answer it guesses the likeliest token.
Otherwise it draws guesses with the sampling settings of the answer and reports their distributions,
so that as many guesses as possible are accepted. Prompts must be computed in this context, too.
This is done only when it takes little time compared with the model, or when drafting has already
saved that time.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import ClassVar, Protocol

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Aborted, NoSlot
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.drafting.gain.acceptance import MAX_RANKS, Acceptance
from llmcli.runtime.drafting.gain.pass_cost import average_seconds
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, choose_shape
from llmcli.runtime.drafting.guesses.candidates import Candidates, fill_shape
from llmcli.runtime.drafting.guesses.guesser import Guesser
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.vocabulary import Vocabulary

CHUNK_TOKENS = 256  # tokens read in one pass; cancellation is checked between passes


class DraftContext(Protocol):
    """The methods and sizes of a context that DraftModel uses."""

    n_ctx: int
    n_batch: int

    def decode(self, rows: BatchRows) -> Iterable[RowLogits]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


class DraftModel:
    """A drafter with a draft model: its context, the tokens cached in it, its speed, and statistics
    of how often its guesses are right.
    """

    name: ClassVar[str] = "model"
    order: ClassVar[int] = 20
    draws: ClassVar[bool] = True

    def __init__(
        self,
        context: DraftContext,
        vocabulary: Vocabulary,
        guess_seconds: float,
        read_seconds: float,
    ) -> None:
        """`guess_seconds`: seconds to guess one token. `read_seconds`: seconds per token when many
        tokens are computed in one pass.
        """
        self.context, self.vocabulary, self.guess_seconds, self.read_seconds = (
            context,
            vocabulary,
            guess_seconds,
            read_seconds,
        )
        self.tokens: list[int] = []
        self.owner: ModelDrafts | None = None  # the answer whose text is in the context
        self.acceptance = Acceptance()
        self.failure: UserError | None = None

    @classmethod
    def create(cls, resources: DrafterResources) -> "DraftModel | None":
        """Create a drafter with the draft model of `resources`. Return None when there is no draft
        model.
        """
        if resources.draft_model is None:
            return None
        context, pass_cost = resources.draft_model
        return cls(context, resources.vocabulary, pass_cost.single_seconds, pass_cost(4) / 4)

    def start(self, request: Request, seed: int) -> "ModelDrafts":
        """Return the state for a new answer. Cached tokens and statistics of earlier answers are
        reused.
        """
        return ModelDrafts(self, request, seed)

    def read(self, tokens: list[int], keep: int) -> RowLogits:
        """Cut the context to its first `keep` tokens and compute `tokens` after them. Return the
        logits after the last token.
        """
        if keep < len(self.tokens):
            if not self.context.trim(0, keep):
                self.context.trim(0, 0)
                tokens, keep = self.tokens[:keep] + tokens, 0
            del self.tokens[keep:]
        row: RowLogits | None = None
        step = min(CHUNK_TOKENS, self.context.n_batch)
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            count, position = len(chunk), len(self.tokens)
            is_last = start + count == len(tokens)
            wants_logits = [False] * (count - 1) + [is_last]
            positions = range(position, position + count)
            rows = BatchRows(chunk, positions, [0] * count, wants_logits)
            row = next(iter(self.context.decode(rows)), None)
            self.tokens += chunk
        assert row is not None
        return row

    def drop_incomplete_pass(self) -> None:
        """Drop the cells of a pass that was not completed."""
        if not self.context.trim(0, len(self.tokens)):
            self.context.trim(0, 0)
            self.tokens, self.owner = [], None


class ModelDrafts:
    """The state of a draft model's guesses for one answer."""

    def __init__(self, model: DraftModel, request: Request, seed: int) -> None:
        self.model = model
        self.guesser = Guesser(request.sampling, seed, model.vocabulary)
        self.sequence: Sequence | None = None
        self.n_matching = 0  # number of tokens at the start of the text that are in the context
        self.n_ranks = 1  # guesses of one token that a draft may have

    def follow(self, sequence: Sequence) -> None:
        self.sequence = sequence
        if self.model.owner is not self:
            self.model.owner, self.n_matching = self, 0
        cached, tokens, count = self.model.tokens, sequence.tokens, self.n_matching
        limit = min(len(cached), len(tokens))
        while count < limit and cached[count] == tokens[count]:
            count += 1
        self.n_matching = count
        self.model.acceptance.forget()

    def on_context_shift(self) -> None:
        """Mark the whole text as unread. It is computed again when this pays."""
        self.n_matching = 0

    def shape(self, limits: ShapeLimits) -> TreeShape:
        assert self.sequence
        if self.model.failure:
            return TreeShape()
        room = self.model.context.n_ctx - len(self.sequence.tokens)
        self.n_ranks = min(MAX_RANKS, limits.n_branches)
        n_depths = max(0, min(limits.n_depths, limits.n_nodes, room))
        chances = self.model.acceptance.chances(n_depths, self.n_ranks)
        return choose_shape(chances, limits, extends_all=False)

    def cost_seconds(self, n_depths: int) -> float:
        return n_depths * self.model.guess_seconds

    def reading_seconds(self) -> float:
        """Return the expected seconds for computing those tokens of the text that are not in the
        context. The last token is not counted, because computing it belongs to the first guess.
        """
        assert self.sequence
        return max(0, len(self.sequence.tokens) - 1 - self.n_matching) * self.model.read_seconds

    def draft(self, shape: TreeShape) -> Draft:
        """Compute the new tokens of the text, then guess token after token on the main path. The
        last guess itself is not computed. The draft is empty if the answer was cancelled, or if
        llama.cpp fails.
        """
        try:
            return self._guess_tokens(shape)
        except (Aborted, NoSlot, UserError) as error:
            self.model.drop_incomplete_pass()
            if isinstance(error, UserError):
                self.model.failure = error
            return Draft()

    def _guess_tokens(self, shape: TreeShape) -> Draft:
        """Do as `draft`. Raises Aborted, NoSlot and UserError as a context does."""
        assert self.sequence
        tokens, model, start_time = self.sequence.tokens, self.model, perf_counter()
        row = self._catch_up(self.sequence)
        if row is None:
            return Draft()
        reading_seconds = max(0.0, perf_counter() - start_time - model.guess_seconds)
        guesses: list[int] = []
        candidates: list[Candidates] = []
        for width in shape.widths():
            if guesses:
                start_time = perf_counter()
                row = model.read(guesses[-1:], len(model.tokens))
                model.guess_seconds = average_seconds(
                    model.guess_seconds, perf_counter() - start_time
                )
            count = self.guesser.count_guesses(width, self.n_ranks)
            candidates.append(self.guesser.choose_tokens(row, [*tokens, *guesses], count))
            guesses.append(candidates[-1].tokens[0])
        return fill_shape(shape, candidates, reading_seconds)

    def _catch_up(self, sequence: Sequence) -> RowLogits | None:
        """Compute the tokens of the text that are not in the context, in chunks. Return the logits
        after the last token, or None if the answer was cancelled in the meantime.
        """
        tokens, start_time = sequence.tokens, perf_counter()
        start = at = min(self.n_matching, len(tokens) - 1)
        row: RowLogits | None = None
        while at < len(tokens):
            if sequence.is_cancelled:
                return None
            row = self.model.read(tokens[at : at + CHUNK_TOKENS], at)
            self.n_matching = at = min(at + CHUNK_TOKENS, len(tokens))
        if at - start > CHUNK_TOKENS // 4:
            self.model.read_seconds = (perf_counter() - start_time) / (at - start)
        return row

    def record_result(self, draft: Draft, tokens: Tokens[int]) -> None:
        self.model.acceptance.record(draft.candidates, tokens)

    def close(self, tokens: Tokens[int]) -> None:
        """Free the sampler chain."""
        self.guesser.close()


DRAFTERS = (DraftModel,)
