"""Drafts from the hidden states of the model: a few layers predict, from the state of a token and
the next token, the token after it. For further guesses they get their own hidden state instead of
the model's.

The layers have a KV cache, in which all tokens of the text must be: those of prompts are computed
after each pass, those of answers before the next draft. The cache has the text of one sequence. When
several answers run, nothing is drafted, and the cache starts again behind them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import ClassVar

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Aborted, Context, NoSlot
from llmcli.runtime.binding.contexts.prediction_context import PredictionContext, States
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.drafting.base import Draft
from llmcli.runtime.drafting.gain.acceptance import MAX_RANKS, Acceptance
from llmcli.runtime.drafting.gain.pass_cost import average_seconds
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, choose_shape
from llmcli.runtime.drafting.guesses.candidates import Candidates, fill_shape
from llmcli.runtime.drafting.guesses.guesser import Guesser
from llmcli.runtime.drafting.guesses.pass_rows import find_text_rows
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.vocabulary import Vocabulary

# States of this many rows are kept before the layers compute them.
MAX_PENDING_ROWS = 64
# A guess that the layers give a smaller probability ends the draft before it.
MIN_PROBABILITY = 0.4


class HiddenStateDrafter(ABC):
    """A drafter whose layers read the hidden states of the model, and those of their own.

    The model has computed the `tokens` from position `offset` on while the drafter observed it. The
    layers have computed those before position `first`. The others are pending, and `states` has what
    the model gave for them. `before` is the state of the row before `first`: zeros if it is unknown,
    or None if the layers leave out the row at `first`.
    """

    draws: ClassVar[bool] = True
    # whether the layers compute the first token of a text, which has no state before it, with zeros
    computes_first_row: ClassVar[bool] = True

    def __init__(self, target: Context, context: PredictionContext, vocabulary: Vocabulary) -> None:
        self.target, self.context, self.vocabulary = target, context, vocabulary
        self.acceptance = Acceptance()
        self.guess_seconds = self._measure()
        self.sequence = -1  # the sequence of the target whose text is in the cache
        self.offset, self.first = 0, 0
        self.tokens: list[int] = []
        self.states: list[States] = []
        self.before = self._first_state()
        # the last answer that was compared, and how many of `tokens` are known to be those of its text
        self.answer: HiddenStateDrafts | None = None
        self.n_compared = 0
        # the rows of a tree of tokens, and their states; the text shows later which of them it has
        self.tree: tuple[BatchRows, States] | None = None
        self.failure: UserError | None = None
        target.on_computed = self.observe

    @abstractmethod
    def read_states(self, count: int) -> States:
        """Return a copy of what the layers need of the first `count` rows of the model's last pass,
        `[count, numbers]`.
        """

    def encode(self, states: States) -> States:
        """Return the hidden states `[rows, n_embd]` of rows of `read_states`. At most `n_batch` rows
        of the context are possible. Raises like `Context.decode`.
        """
        return states

    def start(self, request: Request, seed: int) -> "HiddenStateDrafts":
        """Return the state for a new answer."""
        return HiddenStateDrafts(self, request, seed)

    def _no_state(self) -> States:
        return np.zeros(self.context.n_embd, np.float32)

    def _first_state(self) -> States | None:
        """Return the state before the first row of an empty cache."""
        return self._no_state() if self.computes_first_row else None

    def _measure(self) -> float:
        """Return the seconds of a guess, the least of three."""
        seconds = []
        for _ in range(3):
            start_time = perf_counter()
            self.context.predict([0], 0, self._no_state()[None])
            seconds.append(perf_counter() - start_time)
            self.context.cut(0)
        return min(seconds)

    def observe(self, rows: BatchRows) -> None:
        """Keep the hidden states of a pass of the model. The layers compute them at once if there
        are many.
        """
        self.tree = None
        if self.failure:
            return
        first, position, count = rows.sequences[0], rows.positions[0], len(rows)
        if any(sequence != first for sequence in rows.sequences):
            self.forget_text()
            return
        states = self.read_states(count)
        if rows.branches:
            self.tree = rows, states
            return
        self._add_rows(first, position, rows.tokens, states)

    def _add_rows(self, sequence: int, position: int, tokens: Tokens[int], states: States) -> None:
        """Add the rows of consecutive tokens from a position on."""
        is_known = self.offset <= position <= self.offset + len(self.tokens)
        if sequence != self.sequence or not is_known:
            self._begin(sequence, position)
        self._cut(position)
        self.tokens += tokens
        self.states += list(states)
        if len(self.states) <= MAX_PENDING_ROWS:
            return
        # The pass of the model is complete, whatever happens here.
        try:
            self.catch_up(len(self.states))
        except Aborted:
            self.context.cut(self.first)  # the other rows stay pending
        except NoSlot:
            self.forget_text()
        except UserError as error:
            self.failure = error

    def compare(self, answer: "HiddenStateDrafts", sequence: Sequence) -> None:
        """Forget the rows that are not those of an answer's text. Without a pass, its slot may have got
        a text from host memory or another slot, or its cells may have been moved.
        """
        self.keep_tree_rows(sequence)
        if self.answer is not answer:
            self.answer, self.n_compared = answer, 0
        if self.sequence != sequence.slot:
            return
        text, offset, count = sequence.tokens, self.offset, self.n_compared
        # The last token has no row yet; what was computed there is a wrong guess.
        limit = min(len(self.tokens), len(text) - 1 - offset)
        while count < limit and self.tokens[count] == text[offset + count]:
            count += 1
        if count < limit:
            self._cut(offset + count)
        self.n_compared = count

    def keep_tree_rows(self, sequence: Sequence) -> None:
        """Add those rows of a tree of tokens, which was the last pass, that a text has. Do nothing if
        the tree is that of another slot.
        """
        if self.tree is None or self.tree[0].sequences[0] != sequence.slot:
            return
        (rows, states), self.tree = self.tree, None
        if found := find_text_rows(rows, sequence):
            tokens = [rows.tokens[row] for row in found]
            self._add_rows(sequence.slot, rows.positions[found[0]], tokens, states[found])

    def forget_text(self) -> None:
        """Forget all rows. The next pass begins a text."""
        self._begin(-1, 0)

    def _begin(self, sequence: int, position: int) -> None:
        """Forget the text, and start at a position of a sequence."""
        self.context.cut(0)
        self.sequence, self.before = sequence, self._first_state()
        self.offset = self.first = position
        self.tokens, self.states, self.n_compared = [], [], 0

    def _cut(self, position: int) -> None:
        """Forget the rows from `position` on, which is not before `offset`."""
        if position < self.first:  # the state before is not known any more
            self.context.cut(position)
            self.first, self.states = position, []
            self.before = self._no_state() if self.context.has_cells else self._first_state()
        del self.tokens[position - self.offset :], self.states[position - self.first :]
        self.n_compared = min(self.n_compared, len(self.tokens))

    def catch_up(self, count: int) -> None:
        """Compute the first `count` pending rows. Rows that were computed before an interruption are
        not pending any more.
        """
        self.context.cut(self.first)
        while count:
            n_rows = min(count, self.context.n_batch)
            states = self.encode(np.stack(self.states[:n_rows]))
            n_skipped, at = int(self.before is None), self.first - self.offset
            before = states[:-1] if self.before is None else np.vstack([self.before, states[:-1]])
            if n_rows > n_skipped:
                tokens = self.tokens[at + n_skipped : at + n_rows]
                self.context.predict(tokens, self.first + n_skipped, before)
            self.before = states[-1]
            self.first += n_rows
            del self.states[:n_rows]
            count -= n_rows


class HiddenStateDrafts:
    """The guesses of a HiddenStateDrafter for one answer."""

    def __init__(self, drafter: HiddenStateDrafter, request: Request, seed: int) -> None:
        self.drafter = drafter
        self.guesser = Guesser(request.sampling, seed, drafter.vocabulary)
        self.sequence: Sequence | None = None
        self.n_ranks = 1  # guesses of one token that a draft may have

    def follow(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.drafter.compare(self, sequence)
        self.drafter.acceptance.forget()

    def on_context_shift(self) -> None:
        """Forget the text, because cells may have moved to other positions."""
        self.drafter.forget_text()

    @property
    def _n_unread(self) -> int | None:
        """Return how many pending rows belong to the text, or None if a row is missing."""
        drafter, sequence = self.drafter, self.sequence
        assert sequence
        count = len(sequence.tokens) - 1 - drafter.first
        if drafter.sequence != sequence.slot or not 0 <= count <= len(drafter.states):
            return None
        return count if count or drafter.before is not None else None

    def shape(self, limits: ShapeLimits) -> TreeShape:
        if self.drafter.failure or self._n_unread is None:
            return TreeShape()
        assert self.sequence
        room = self.drafter.context.n_ctx - len(self.sequence.tokens)
        self.n_ranks = min(MAX_RANKS, limits.n_branches)
        n_depths = max(0, min(limits.n_depths, limits.n_nodes, room))
        chances = self.drafter.acceptance.chances(n_depths, self.n_ranks)
        return choose_shape(chances, limits, extends_all=False)

    def cost_seconds(self, n_depths: int) -> float:
        return (n_depths + bool(self._n_unread)) * self.drafter.guess_seconds

    def reading_seconds(self) -> float:
        """Return 0: the passes over the text were observed, so there is nothing to read."""
        return 0.0

    def draft(self, shape: TreeShape) -> Draft:
        """Compute the pending rows of the text, and then guess token after token on the main path.
        The draft ends early where the layers are not sure. It is empty if it was interrupted, or if
        llama.cpp fails.
        """
        drafter, sequence = self.drafter, self.sequence
        assert sequence
        n_unread = self._n_unread
        assert n_unread is not None
        guesses: list[int] = []
        candidates: list[Candidates] = []
        try:
            if n_unread:
                drafter.catch_up(n_unread)
            position, token, state = len(sequence.tokens) - 1, sequence.tokens[-1], drafter.before
            assert state is not None
            for width in shape.widths():
                start_time = perf_counter()
                row = drafter.context.predict([token], position, state[None])
                seconds = perf_counter() - start_time
                drafter.guess_seconds = average_seconds(drafter.guess_seconds, seconds)
                state = drafter.context.last_state(row)
                if guesses and _top_probability(row) < MIN_PROBABILITY:
                    break
                text = [*sequence.tokens, *guesses]
                count = self.guesser.count_guesses(width, self.n_ranks)
                candidates.append(self.guesser.choose_tokens(row, text, count))
                token, position = candidates[-1].tokens[0], position + 1
                guesses.append(token)
        except (Aborted, NoSlot, UserError) as error:
            candidates = []
            if isinstance(error, UserError):
                drafter.failure = error
        drafter.context.cut(drafter.first)
        return fill_shape(shape, candidates)

    def record_result(self, draft: Draft, tokens: Tokens[int]) -> None:
        self.drafter.acceptance.record(draft.candidates, tokens)

    def close(self, tokens: Tokens[int]) -> None:
        """Keep the rows of the last pass for the next turn, and free the sampler chain."""
        if self.sequence:
            self.drafter.keep_tree_rows(self.sequence)
        self.guesser.close()


def _top_probability(row: RowLogits) -> float:
    """Return the probability of the likeliest token of a row."""
    top = float(row.logits.max())
    return float(np.exp(top - row.log_sum(top)))
