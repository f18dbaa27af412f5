"""The next pass of running answers, computed while the texts of their last tokens are handled.

When the tokens of a pass are drawn, the next pass can begin. Decoding the tokens to text, searching
stop strings and delivering events then take place while another thread computes it. If an answer
ends because of its text, or gets another token than the drawn one, its row of the next pass is in
vain, and its cell is removed.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Aborted, NoSlot
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.engine.forward_pass import ForwardPass, SequenceRows
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits


class BackgroundDecoder(Protocol):
    """The methods of a context that compute a pass on another thread."""

    @property
    def can_begin_decode(self) -> bool: ...

    def begin_decode(self, rows: BatchRows) -> None: ...

    def end_decode(self) -> tuple[SequenceOf[RowLogits], float]: ...


def plan_pass_ahead(plan: ForwardPass) -> ForwardPass | None:
    """Return the pass after `plan`, whose tokens are drawn but not yet accepted: one row for each
    sequence. Return None if the next token of any sequence is not known yet, or ends its answer.
    """
    following = ForwardPass()
    for sequence, count, n_logits in plan.shares:
        position = len(sequence.tokens)
        if n_logits != 1 or sequence.n_computed + count != position or sequence.is_cancelled:
            return None
        token = sequence.strategy.next_token(sequence)
        if token is None or position >= sequence.max_tokens:
            return None
        following.tokens.append(token)
        following.positions.append(position)
        following.slots.append(sequence.slot)
        following.wants_logits.append(True)
        following.shares.append(SequenceRows(sequence, 1, 1))
    return following


class PassAhead:
    """A pass that was begun before its step. Rows can be dropped from it until it is used."""

    def __init__(self, context: BackgroundDecoder, ledger: Ledger, plan: ForwardPass) -> None:
        """Begin to compute `plan`, which has one row for each sequence."""
        self._context, self._ledger, self._plan = context, ledger, plan
        self._rows: SequenceOf[RowLogits] | None = None
        self._seconds = 0.0
        self._error: Aborted | NoSlot | UserError | None = None
        self._kept = list(range(len(plan.shares)))  # numbers of the rows that were not dropped
        context.begin_decode(BatchRows(plan.tokens, plan.positions, plan.slots, plan.wants_logits))

    @property
    def plan(self) -> ForwardPass:
        """Return the pass without the dropped rows."""
        if len(self._kept) == len(self._plan.shares):
            return self._plan
        plan, kept = self._plan, self._kept
        return ForwardPass(
            [plan.tokens[row] for row in kept],
            [plan.positions[row] for row in kept],
            [plan.slots[row] for row in kept],
            [True] * len(kept),
            [plan.shares[row] for row in kept],
        )

    def end(self) -> tuple[SequenceOf[RowLogits], float]:
        """Wait for the pass. Return the logits of the rows that were not dropped, and the seconds
        of the computation.

        Raises what Context.decode raises.
        """
        self._wait()
        if self._error is not None:
            raise self._error
        assert self._rows is not None
        return [self._rows[row] for row in self._kept], self._seconds

    def drop(self, sequence: Sequence) -> None:
        """Remove the row of a sequence, if it has one. Its cell is removed from its slot."""
        for row in self._kept:
            if self._plan.shares[row].sequence is sequence:
                self._wait()
                self._ledger.restore(sequence.slot)
                self._kept.remove(row)
                return

    def drop_unfit(self) -> None:
        """Remove the rows of sequences that did not get the token that was drawn for them."""
        for row in tuple(self._kept):
            sequence, position = self._plan.shares[row].sequence, self._plan.positions[row]
            if sequence.tokens[position:] != [self._plan.tokens[row]] or sequence.draft:
                self.drop(sequence)

    def drop_all(self) -> None:
        """Remove all rows."""
        for share in self._plan.shares:
            self.drop(share.sequence)

    def _wait(self) -> None:
        """Wait for the pass, and keep its result."""
        if self._rows is None and self._error is None:
            try:
                self._rows, self._seconds = self._context.end_decode()
            except (Aborted, NoSlot, UserError) as error:
                self._error = error
