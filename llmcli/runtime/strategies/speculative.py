"""Speculative decoding: guess the next tokens, compute them in one forward pass, and keep the
guesses that the model would have generated.

The guesses are a path or a tree of tokens (SpecInfer, Miao et al. 2024). The distribution of the
answer does not change (Leviathan et al. 2023; llama.cpp's common_sampler_sample_and_accept_n). From
the row of the last token, the request's sampler chain draws a token, as it would without guesses. If
the token is one of the guesses there, the row of that guess is next, and so on. The first drawn token
that is not guessed ends this, and the KV cells of all other guesses are dropped. If a drafter drew
the guesses from a known distribution, rejection sampling confirms them as often as possible
(sampling/rejection.py). Inside a grammar, which changes the distribution, rejection sampling is not
used.

Drafters without costs add their guesses to the tree of another one where the pass has room for more
rows, because a pass costs the same up to the next multiple of four rows.

A pass without guesses costs the same as in plain decoding, plus one table lookup. Inside a grammar
the forced text is inserted first (guided.py). Guesses that agree with the forced text need no
further computation, because the pass has computed them already.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DraftState, RowObserver
from llmcli.runtime.drafting.draft_length import DraftLength
from llmcli.runtime.drafting.gain.pass_cost import PassCost, round_up_rows
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.context_protocols import CacheMemory
from llmcli.runtime.requests.draft_counts import DraftTally
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.requests.token_tree import NO_DRAFT, TEXT, TokenTree
from llmcli.runtime.sampling.chain import NumpyChain, RowLogits
from llmcli.runtime.sampling.rejection import Proposal, RejectionChain
from llmcli.runtime.strategies.base import Speculation, StrategyResources
from llmcli.runtime.strategies.guided import GuidedStrategy
from llmcli.types import Event, Finish


class SpeculativeStrategy(GuidedStrategy):
    """Adds one token per forward pass, or several when guesses are right.

    The tokens of one pass become visible together. Each is recorded with an equal share of the
    pass's time, so that the times add up and their percentiles can be compared with plain decoding.
    """

    name: ClassVar[str] = "speculative"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        speculation = resources.speculation or Speculation((), PassCost({1: 1.0}), 1)
        uses_rejection = (
            any(drafter.draws for drafter in speculation.drafters)
            and not request.sampling.is_greedy
        )
        draft_request = request
        if uses_rejection and speculation.is_reproducible:
            # Only the chain's own draw may confirm a guess, so the drafters guess the likeliest
            # token.
            uses_rejection, draft_request = (
                False,
                replace(request, sampling=request.sampling.with_values({"temp": 0})),
            )
        super().__init__(
            request, seed, replace(resources, native=None) if uses_rejection else resources
        )
        self.rejection_chain = (
            RejectionChain(self.chain)
            if uses_rejection and isinstance(self.chain, NumpyChain)
            else None
        )
        self.chain = self.rejection_chain or self.chain
        self.ledger = resources.ledger
        self.draft_length = DraftLength(
            speculation.pass_cost,
            speculation.max_rows,
            _max_free_guesses(self.ledger.memory),
            speculation.takes_longest,
            speculation.max_branches,
        )
        self.drafters = [drafter.start(draft_request, seed) for drafter in speculation.drafters]
        self.limit = math.inf if request.max_tokens is None else request.max_tokens
        self.last_draft: _JointDraft | None = None  # that was not checked yet
        self.tally = DraftTally("")  # of all drafters together
        self.tallies = [DraftTally(drafter.name) for drafter in speculation.drafters]
        self.n_passes = 0  # passes after the first token
        # False once no cells of wrong guesses can be dropped; then drafting stops
        self.can_drop_cells = True
        # tokens of the slot before the present draft, and whether a checkpoint there is needed for
        # this draft only
        self.n_before_draft, self.has_draft_checkpoint = 0, False
        # rows of the next pass without those of the guesses; more than one after forced text
        self.pass_rows = 0
        self.was_alone = False  # whether no other answer ran when the last pass was planned

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from the row of the last token, and then from the row of each guess until a guess is
        wrong. Then make the guesses for the next pass. Return the events of the new tokens, and the
        reason to finish if the answer ends.
        """
        self.n_passes += bool(sequence.times)
        if sequence.draft:
            events, finish = self._verify(sequence, rows, pass_seconds)
        else:
            events, finish = super().accept(sequence, rows, pass_seconds)
            if self.last_draft:  # it was empty, or the engine has discarded it
                self.draft_length.record_unused(self.last_draft.seconds)
                self.last_draft = None
            if self.pass_rows == 1:
                is_shared = not self.was_alone or self.ledger.n_busy > 1
                self.draft_length.record_single(pass_seconds, is_shared)
            elif not self.pass_rows:
                self.draft_length.record_prompt(sequence.accounting.prompt_seconds)
        if finish is None and self.can_drop_cells:
            self.pass_rows = len(sequence.tokens) - sequence.n_computed
            self._guess(sequence)
        self.was_alone = self.ledger.n_busy == 1
        return events, finish

    def next_token(self, sequence: Sequence) -> int | None:
        """Return the token of the planned draw as plain decoding does. Return None if guesses may
        follow it in the next pass.
        """
        may_guess = self.drafters and self.can_drop_cells and self.ledger.n_busy == 1
        return None if may_guess else super().next_token(sequence)

    def _guess(self, sequence: Sequence) -> None:
        """Fill `sequence.draft` with the guesses of the drafter that is expected to save the most
        time. The draft stays empty if none saves any, and while other answers run: it would not
        be computed, so the drafters do not read the text either. It also stays empty if recurrent
        state is behind the text after a wrong guess: a checkpoint there would be too early.
        """
        if self.ledger.n_busy > 1 or (self.ledger.memory.is_recurrent and self.pass_rows > 1):
            return
        for candidate in self.drafters:
            candidate.follow(sequence)
        # A pass also yields one token without a guess. The draft ends where the engine checks the
        # text for repetition, so that the check reads the same text as without drafting.
        limit = min(self.limit, sequence.repetition_check_at) - len(sequence.times) - 1
        best_gain, shape = 0.0, TreeShape()
        drafter: DraftState | None = None
        for candidate in self.drafters:
            gain, found = self.draft_length.rate(candidate, limit, self.pass_rows)
            if found and gain > best_gain:
                best_gain, shape, drafter = gain, found, candidate
        if drafter is None:
            return
        start_time = perf_counter()
        shape = shape.shorten(self._secure_return(sequence.slot, len(shape)))
        if not shape:
            return
        draft = drafter.draft(shape)
        parts = [(drafter, draft)]
        tree = draft.tree
        if tree and self.draft_length.max_branches > 1:
            tree = self._add_free_guesses(tree, parts, limit)
        sequence.draft = tree
        self.last_draft = _JointDraft(tuple(parts), perf_counter() - start_time)

    def _add_free_guesses(
        self, tree: TokenTree, parts: list[tuple[DraftState, Draft]], limit: float
    ) -> TokenTree:
        """Return the tree of a draft with the guesses of those other drafters that take no time, as
        far as the pass has room for them without more cost. `parts`: the draft, to which theirs are
        added.
        """
        n_rows = min(round_up_rows(self.pass_rows + len(tree)), self.draft_length.max_rows)
        n_nodes, drafter = n_rows - self.pass_rows, parts[0][0]
        for other in self.drafters:
            if other is drafter or len(tree) >= n_nodes:
                continue
            if other.cost_seconds(1) or other.reading_seconds():
                continue
            shape = other.shape(ShapeLimits(n_nodes, int(min(n_nodes, limit))))
            if not shape:
                continue
            found = other.draft(shape)
            larger = tree.add_path(found.tree.tokens).shorten(n_nodes)
            if len(larger) > len(tree) and len(larger.leaves()) <= self.draft_length.max_branches:
                tree = larger
                parts.append((other, found))
        return tree

    def _secure_return(self, slot: int, count: int) -> int:
        """Return how many of `count` wrong guesses can be dropped, all of them after a checkpoint if
        necessary. Without room for one, later drafts are so short that they need none.
        """
        ledger = self.ledger
        self._drop_draft_checkpoint(slot)
        self.n_before_draft = len(ledger.tokens[slot])
        if ledger.can_return(slot, count):
            return count
        start_time = perf_counter()
        self.has_draft_checkpoint = ledger.take_checkpoint(slot)
        if self.has_draft_checkpoint:
            self.draft_length.pass_cost.record_checkpoint(perf_counter() - start_time)
            return count
        self.draft_length.refuse_checkpoints()
        self.can_drop_cells = self.draft_length.max_rows > 1
        return min(count, self.draft_length.max_rows - 1)

    def _drop_draft_checkpoint(self, slot: int) -> None:
        """Drop the checkpoint that was taken for the last draft."""
        if self.has_draft_checkpoint:
            self.ledger.checkpoints.discard(slot, self.n_before_draft)
            self.has_draft_checkpoint = False

    def _verify(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw a token from the row of the last token and of each right guess, until a token is not
        guessed. Drop the cells of the wrong guesses. Record how many guesses were right and how long
        the pass took. Return the same as `accept`.
        """
        assert self.last_draft
        joint, self.last_draft = self.last_draft, None
        tree, sequence.draft = sequence.draft, NO_DRAFT  # the engine may have shortened the draft
        pass_logits = list(islice(rows, len(tree) + 1))
        last_token = sequence.tokens[-1]
        start, previous_time = len(sequence.tokens), sequence.last_token_time
        events: list[Event] = []
        path: list[int] = []
        try:
            while True:
                node, length = path[-1] if path else TEXT, len(sequence.tokens)
                has_guess = node in tree.parents
                if self.rejection_chain and has_guess:
                    self.rejection_chain.proposals = joint.proposals(tree, node)
                new_events, finish = super().accept(sequence, iter((pass_logits[node + 1],)), 0.0)
                events += new_events
                if self.rejection_chain:
                    self.rejection_chain.proposals = ()  # where no token was drawn
                is_guessed = tree.follow(path, sequence.tokens[length:])
                if finish is not None or not is_guessed or not has_guess:
                    break
            for drafter, _ in joint.parts:
                if isinstance(drafter, RowObserver):
                    drafter.observe_rows(last_token, tree, pass_logits, path)
            start_time = perf_counter()
            self._keep_path(sequence, start, tree, path)
            return_seconds = perf_counter() - start_time
        finally:
            if not tree.is_chain:
                self.ledger.drop_branches()
        self._record_result(joint, tree, sequence.tokens[start : start + len(path) + 1])
        self.draft_length.record_draft(
            len(tree) + self.pass_rows,
            len(path) + 1,
            pass_seconds,
            joint.seconds + return_seconds,
            joint.reading_seconds,
            self.pass_rows,
        )
        return _share_times(sequence, events, previous_time, pass_seconds), finish

    def _record_result(self, joint: "_JointDraft", tree: TokenTree, tokens: list[int]) -> None:
        """Tell the drafters, and count, what became of their guesses. `tree`: that was checked.
        `tokens`: those that were chosen in its place.
        """
        n_checked, n_right = _count_right(tree, tokens)
        n_depths = tree.n_depths
        self.tally.record(n_depths, n_checked, n_right, 0.0)
        seconds = max(0.0, joint.seconds - joint.reading_seconds)
        for drafter, draft in joint.parts:
            checked, right = _count_right(draft.tree, tokens)
            self.tallies[self.drafters.index(drafter)].record(
                min(n_depths, draft.tree.n_depths),
                min(n_checked, checked),
                min(n_right, right),
                seconds,
            )
            seconds = 0.0  # the other parts take none
            drafter.record_result(draft, tokens)

    def _keep_path(self, sequence: Sequence, start: int, tree: TokenTree, path: list[int]) -> None:
        """Drop the sequence's cells of all guesses but those on `path`. Those after the first
        `start` tokens are of the main path of `tree`.
        """
        n_main = common_prefix(path, tree.main_path())
        if n_main == len(path):
            self._drop_wrong_guesses(sequence, start + n_main)
            return
        branch = tree.branches()[path[-1]][0]
        tokens = [tree.tokens[node] for node in path[n_main:]]
        self.ledger.keep_branch(sequence.slot, start + n_main, branch, tokens)
        sequence.n_computed = start + len(path)

    def _drop_wrong_guesses(self, sequence: Sequence, n_valid: int) -> None:
        """Drop the sequence's cells after its first `n_valid` tokens. Recurrent state goes back to
        the checkpoint before the draft, and the tokens after it are computed again.
        """
        sequence.n_computed = self.ledger.trim(sequence.slot, n_valid)
        self.can_drop_cells = sequence.n_computed >= self.n_before_draft
        self.draft_length.record_repetition(n_valid - sequence.n_computed)
        self._drop_draft_checkpoint(sequence.slot)

    def on_context_shift(self, sequence: Sequence) -> None:
        """Discard the guesses, and tell the drafters that tokens were dropped from the text."""
        super().on_context_shift(sequence)
        sequence.draft, self.pass_rows = NO_DRAFT, 0
        for drafter in self.drafters:
            drafter.on_context_shift()

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Record how many tokens were drafted and accepted, and close the drafters. Return the text
        that was held back.
        """
        accounting = sequence.accounting
        total, counts = self.tally.counts(), [tally.counts() for tally in self.tallies]
        accounting.n_drafted, accounting.n_accepted = total.n_guesses, total.n_right
        accounting.n_drafts = total.n_drafts
        accounting.drafts = tuple(one for one in counts if one.n_drafts)
        accounting.n_passes = self.n_passes
        if sequence.slot >= 0:
            self._drop_draft_checkpoint(sequence.slot)
        for drafter in self.drafters:
            drafter.close(sequence.tokens)
        return super().finish(sequence, finish)


@dataclass(frozen=True, slots=True)
class _JointDraft:
    """The draft of one drafter, and those of others that were added to its tree.

    `seconds`: the time for all of them, with reading the text.
    """

    parts: tuple[tuple[DraftState, Draft], ...]
    seconds: float

    @property
    def reading_seconds(self) -> float:
        """Return the seconds for reading the text."""
        return self.parts[0][1].reading_seconds

    def proposals(self, tree: TokenTree, node: int) -> list[Proposal]:
        """Return the guesses after a node of the tree for rejection sampling; none if the first
        drafter has not drawn its guesses. Those of the other drafters are not drawn.
        """
        distributions = self.parts[0][1].distributions
        if not distributions:
            return []
        return [
            Proposal(
                tree.tokens[child], distributions[child] if child < len(distributions) else None
            )
            for child, parent in enumerate(tree.parents)
            if parent == node
        ]


def _count_right(tree: TokenTree, tokens: list[int]) -> tuple[int, int]:
    """Return how many depths of a draft were checked by the tokens that the model has chosen, and
    how many had the right guess. A token that was not guessed has checked the guesses there, too.
    """
    path: list[int] = []
    if tree.follow(path, tokens):
        return len(path), len(path)
    node = path[-1] if path else TEXT
    return len(path) + (node in tree.parents), len(path)


def _max_free_guesses(memory: CacheMemory) -> float:
    """Return the most guesses that a memory can drop without going back to a checkpoint."""
    return memory.n_rs_seq if memory.is_recurrent else math.inf


def _share_times(
    sequence: Sequence, events: list[Event], previous_time: float, pass_seconds: float
) -> list[Event]:
    """Return the events of one pass with all times divided equally among its tokens: the forward
    pass, the sampling, the grammar, and the gap since the previous token. `sequence.times` is
    updated in the same way.

    `previous_time`: time.perf_counter() of the last token before the pass.
    """
    token_times = [event.token for event in events if event.token]
    if not token_times:
        return events
    count = len(token_times)
    gap = (sequence.last_token_time - previous_time) * 1e3 / count
    decode = pass_seconds * 1e3 / count
    sample, grammar = (
        sum(getattr(times, field) for times in token_times) / count
        for field in ("sample_ms", "constraint_ms")
    )
    equal_times = [
        times._replace(ms=gap, decode_ms=decode, sample_ms=sample, constraint_ms=grammar)
        for times in token_times
    ]
    sequence.times[-count:] = equal_times
    tokens = iter(equal_times)
    return [event._replace(token=next(tokens)) if event.token else event for event in events]


STRATEGIES = (SpeculativeStrategy,)
