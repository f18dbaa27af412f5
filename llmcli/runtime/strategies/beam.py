"""Beam search: the k likeliest answers are extended by one token in every forward pass. Beams with
a common prefix share its KV cells.

The rules for choosing beams, for finishing answers and for ending the search are those of
transformers (generation/utils.py, `_beam_search`). Beams are numbered from the likeliest. Among
continuations with equal scores, the one of the lowest beam ranks first, then the lowest token id.
Among finished answers with equal scores, the answer found first ranks first. (torch.topk leaves the
order of equal scores open.)

Inside a grammar, forbidden tokens get the log-probability -inf, and the log-probabilities of the
others are not renormalized (constrained_beam.py). An answer that reaches the length limit before
the grammar accepts it ranks after all accepted answers. Text that the grammar leaves no choice
about is still computed token by token.

Each beam has a slot (llmcli's word for a llama.cpp sequence id) of the ledger. A beam's best
continuation stays in the slot of the beam. Each further continuation gets the slot of a beam that
has no continuation; this slot then shares the cells of the extended beam.
"""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from llmcli.runtime.requests.repetition import TOKENS_BETWEEN_CHECKS, is_repetitive
from llmcli.runtime.requests.request import Hypothesis, Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import PlannedDraw, RowLogits
from llmcli.runtime.sampling.top_logprobs import top_threshold
from llmcli.runtime.strategies.base import StrategyResources, end_tokens, refuse_nan
from llmcli.runtime.strategies.beam_overflow import BeamRebuild, context_tokens
from llmcli.runtime.strategies.constrained_beam import GrammarBranch, start_branch
from llmcli.runtime.strategies.constrained_chain import dead_end_error
from llmcli.runtime.text.detokenizer import Detokenizer
from llmcli.types import Event, Finish, TokenTime

# Tokens whose logit is this far below the threshold are also candidates, because a score is a
# rounded sum.
LOGIT_SLACK = 1e-3


@dataclass(frozen=True, slots=True)
class BeamNode:
    """One token of an answer with its log-probability, linked to the token before it. `parent` is
    None for the first token. Beams with a common prefix share the nodes of the prefix.
    """

    parent: "BeamNode | None"
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished answer of the search."""

    slot: int  # llama.cpp sequence id of its cells
    score: float  # sum of the log-probabilities of its tokens
    node: BeamNode | None  # its last token; None before the first one
    decoder: Detokenizer  # the state of its text, to find stop strings
    branch: GrammarBranch | None  # its state in the grammar; None without a grammar

    def is_complete(self) -> bool:
        """Return whether the grammar accepts the answer as it is; True without a grammar."""
        return self.branch is None or self.branch.is_accepting


class BeamCandidate(NamedTuple):
    """A possible next token of a beam. The order of the fields makes candidates sort from best to
    worst; a tuple sorts faster than an object with a key.
    """

    cost: float  # the negative score, so that the best candidate sorts first
    beam: int  # index of the beam that it extends
    token: int
    logprob: float  # of the token alone

    @property
    def score(self) -> float:
        """Return the sum of the log-probabilities of the beam's tokens and this one."""
        return -self.cost


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished answer of the search."""

    is_complete: bool  # whether the grammar accepts the answer; True without a grammar
    score: float  # sum of log-probabilities; once in the ranking, divided by length ** penalty
    node: BeamNode  # its last token
    finish: Finish


class BeamStepTimes(NamedTuple):
    """The milliseconds of one step of the search. `ms` is the time since the previous step; the
    other fields are its parts in the forward pass, the search and the grammar.
    """

    ms: float
    decode_ms: float
    sample_ms: float
    constraint_ms: float


class BeamSearch:
    """Extends `search.beams` unfinished answers in every pass, and keeps the best `search.beams`
    finished answers.
    """

    name: ClassVar[str] = "beam"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        self.request, self.search, self.slots = request, request.search, request.search.beams
        self.vocabulary, self.ledger = resources.vocabulary, resources.ledger
        # The context must hold the prompt and the answer without its last token, which is never
        # computed. The limit does not apply when tokens may be dropped.
        self.max_new_tokens = resources.ledger.size - len(request.tokens) + 1
        context_limit = math.inf if request.overflow else self.max_new_tokens
        self.limit = (
            context_limit if request.max_tokens is None else min(request.max_tokens, context_limit)
        )
        self._reset()

    def _reset(self) -> None:
        """Set the state of the search to that before its first step."""
        self.rebuild = BeamRebuild(self.ledger)
        self.beams: list[Beam] = []
        self.free_slots: list[int] = []  # slots without a beam
        self.finished: list[FinishedBeam] = []  # best first, at most `search.beams` of them
        self.steps: list[BeamStepTimes] = []
        self.grammar_seconds = 0.0  # seconds in the grammar since the last step
        self.last_log_sum = float("nan")  # of the last row read: an estimate for the next row

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return the slot and the last token of every beam, which the next pass computes. Empty
        before the first step.
        """
        return [(beam.slot, beam.node.token) for beam in self.beams if beam.node]

    def plan_draw(self, sequence: Sequence, row: int) -> PlannedDraw | None:
        """Return None: a beam search draws nothing."""
        return None

    def next_token(self, sequence: Sequence) -> int | None:
        """Return None: the next tokens depend on the logits of all beams."""
        return None

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Extend the beams by one token. Return no events, because nothing is shown before the end
        of the search, and the reason to finish if the search is over.

        Raises UserError when a logit is NaN, and UnsatisfiableConstraint when the grammar allows no
        token.
        """
        if self.rebuild.is_busy:
            # The beam was extended with these logits before the context was shortened.
            next(rows)
            self.rebuild.finish_beam(sequence)
            return [], None
        start_time = time.perf_counter()
        if not self.steps:
            first = Beam(
                sequence.slot,
                0.0,
                None,
                Detokenizer(self.request.stops),
                start_branch(self.request),
            )
            self.beams, self.free_slots = [first], sequence.branch_slots[:]
        if self.limit == 0:
            return [], "length"
        beam_rows = [next(rows) for _ in self.beams]
        if not self.steps:
            refuse_nan(beam_rows[0])
            pass_seconds = sequence.accounting.prompt_seconds
        running = self._select_candidates(beam_rows)
        is_over = self._is_over(running)
        if is_over:
            self._close_branches(self.beams)
            self.beams = []
        else:
            self._extend_beams(running)
        now = time.perf_counter()
        search_seconds = now - start_time - self.grammar_seconds
        self.steps.append(
            BeamStepTimes(
                (now - sequence.last_token_time) * 1e3,
                pass_seconds * 1e3,
                search_seconds * 1e3,
                self.grammar_seconds * 1e3,
            )
        )
        sequence.last_token_time, self.grammar_seconds = now, 0.0
        if is_over and not self.finished:
            raise dead_end_error()
        if is_over:
            return [], self.finished[0].finish
        return [], "repetition" if self._best_beam_repeats(sequence) else None

    def _best_beam_repeats(self, sequence: Sequence) -> bool:
        """Return whether the best unfinished answer only repeats itself. This is checked only if
        tokens may be dropped from a full context; otherwise the context limits the answer.
        """
        if not self.request.overflow or len(self.steps) < sequence.repetition_check_at:
            return False
        sequence.repetition_check_at = len(self.steps) + TOKENS_BETWEEN_CHECKS
        answer = b"".join(self.vocabulary.piece(node.token) for node in _path(self.beams[0].node))
        return is_repetitive([answer.decode("utf-8", "replace")])

    def on_context_shift(self, sequence: Sequence) -> None:
        """Raise AssertionError: the engine calls `apply_overflow` for a beam search."""
        raise AssertionError("the engine shortens beams with apply_overflow")

    def apply_overflow(self, sequence: Sequence, max_cells: int) -> None:
        """Drop the same tokens from all beams of a full context, if the request allows it. All
        beams together may use `max_cells` cells.
        """
        if self.request.overflow:
            last_tokens = dict(self.pending_rows())
            self.rebuild.shorten(sequence, self.request.overflow, last_tokens, max_cells)

    def restart(self, sequence: Sequence) -> None:
        """Start the search again from the prompt. This is possible because nothing was shown yet;
        the result is the same.
        """
        self._close_branches(self.beams)
        self._reset()
        sequence.restart()

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Store all answers in `sequence.beams`, best first, and return the text of the best. When
        the search was cut short, unfinished answers are ranked together with finished ones.

        Of the search's slots, only the one that shares the longest prefix with the best answer
        stays claimed.
        """
        if finish in ("cancelled", "context_full", "repetition") and self.steps:
            for beam in self.beams:
                if beam.node:
                    self._add_finished(
                        FinishedBeam(beam.is_complete(), beam.score, beam.node, finish),
                        len(self.steps),
                    )
        self._close_branches(self.beams)
        answers = [self._build_answer(finished) for finished in self.finished]
        sequence.beams = tuple(hypothesis for hypothesis, _ in answers)
        best, times = answers[0] if answers else (Hypothesis("", 0.0, ()), [])
        sequence.times += times
        if sequence.slot >= 0 and sequence.branch_slots:
            slots = [sequence.slot, *sequence.branch_slots]
            sequence.slot, sequence.branch_slots = (
                self.ledger.keep_best_branch(slots, context_tokens(sequence, best.tokens)),
                [],
            )
        return best.text

    def _select_candidates(self, rows: list[RowLogits]) -> list[tuple[BeamCandidate, Detokenizer]]:
        """Return the best continuations that do not end their answer, best first and at most
        `search.beams` of them, each with the text decoder after its token. Add the continuations
        that end their answer to `finished` if they are among the best `search.beams`.

        `rows`: the logits of each beam. They are changed where a grammar forbids tokens.
        """
        width, n_wanted = self.search.beams, 2 * self.search.beams
        log_sums = []
        for row in rows:
            log_sums.append(row.log_sum(self.last_log_sum))
            self.last_log_sum = log_sums[-1]
        self._mask_forbidden(rows)
        offsets = [beam.score - total for beam, total in zip(self.beams, log_sums, strict=True)]
        while True:
            candidates = self._best_candidates(rows, offsets, log_sums, n_wanted)
            checked = [
                (candidate, *self._finish_after(candidate))
                for candidate in candidates
                if not self._is_ignored_end(candidate.token)
            ]
            running = [
                (candidate, decoder) for candidate, decoder, finish in checked if finish is None
            ]
            are_enough = len(running) >= width or (
                len(self.steps) + 1 == self.limit and len(checked) >= width
            )
            if are_enough or len(candidates) < n_wanted:
                break
            n_wanted *= 2
        for candidate, _, finish in checked[:width]:
            if finish is not None:
                beam = self.beams[candidate.beam]
                node = BeamNode(beam.node, candidate.token, candidate.logprob)
                self._add_finished(
                    FinishedBeam(
                        self._is_complete_with(beam, candidate.token, finish),
                        candidate.score,
                        node,
                        finish,
                    ),
                    len(self.steps) + 1,
                )
        return running[:width]

    def _mask_forbidden(self, rows: list[RowLogits]) -> None:
        """Write -inf into the logits of each beam for the tokens that the beam's grammar state
        forbids next. `rows`: one for each beam.
        """
        if self.request.grammar is None:
            return
        start_time = time.perf_counter()
        for beam, row in zip(self.beams, rows, strict=True):
            if beam.branch:
                beam.branch.forbid(row.logits, end_tokens(self.vocabulary))
        self.grammar_seconds += time.perf_counter() - start_time

    def _is_complete_with(self, beam: Beam, token: int, finish: Finish) -> bool:
        """Return whether the grammar accepts the answer of this beam if it ends with `token` for
        the reason `finish`; True without a grammar.
        """
        # an end token is a candidate only where the grammar accepts the answer
        if beam.branch is None or self.vocabulary.is_end(token):
            return True
        # the answer is cut off before a stop string, so the grammar is not complete
        if finish == "stop":
            return False
        branch = beam.branch.child(token, self.vocabulary.piece(token))
        accepting = branch.is_accepting
        branch.close()
        return accepting

    def _best_candidates(
        self, rows: list[RowLogits], offsets: list[float], sums: list[float], count: int
    ) -> list[BeamCandidate]:
        """Return the `count` best continuations of all beams, best first. The score of a
        continuation is the beam's score plus the token's log-probability.

        `rows`, `offsets` and `sums` have one entry for each beam: its logits, its score minus the
        log-sum of the logits, and that log-sum.
        """
        best: list[BeamCandidate] = []
        for beam, (row, offset, total) in enumerate(zip(rows, offsets, sums, strict=True)):
            logits = row.logits
            # once there are `count` continuations, only tokens that beat the worst of them matter
            threshold = (
                -best[-1].cost - offset - LOGIT_SLACK
                if len(best) == count
                else top_threshold(logits, count)
            )
            ids = np.flatnonzero(logits >= max(threshold, float(np.finfo(np.float32).min)))
            values = logits[ids].tolist()
            best += [
                BeamCandidate(-(offset + value), beam, token, value - total)
                for token, value in zip(ids.tolist(), values, strict=True)
            ]
            best.sort()
            del best[count:]
        return best

    def _is_ignored_end(self, token: int) -> bool:
        """Return whether `token` is an end token that the request never generates."""
        return self.request.ignore_eos and self.vocabulary.is_end(token)

    def _finish_after(self, candidate: BeamCandidate) -> tuple[Detokenizer, Finish | None]:
        """Return the text decoder of the extended answer, and the reason to finish if the answer
        ends with the candidate's token.
        """
        decoder = self.beams[candidate.beam].decoder
        if self.vocabulary.is_end(candidate.token):
            return decoder, "stop"
        if decoder.stops:
            decoder = copy.copy(decoder)
            decoder.feed(self.vocabulary.piece(candidate.token))
            if decoder.is_stopped:
                return decoder, "stop"
        if len(self.steps) + 1 < self.limit:
            return decoder, None
        return decoder, "length" if self.limit == self.request.max_tokens else "context_full"

    def _add_finished(self, answer: FinishedBeam, length: int) -> None:
        """Add an answer to `finished`, and keep only the best `search.beams` answers there.

        `answer.score` is the plain sum of log-probabilities. It is divided by `length` **
        length_penalty, with `length` in tokens.
        """
        score = answer.score / length**self.search.length_penalty
        self.finished.append(replace(answer, score=score))
        # the sort is stable, so among equal scores the answer found first comes first
        self.finished.sort(key=lambda finished: (not finished.is_complete, -finished.score))
        del self.finished[self.search.beams :]

    def _is_over(self, running: list[tuple[BeamCandidate, Detokenizer]]) -> bool:
        """Return whether the search is over, because no unfinished answer can still be among the
        best. `running`: the unfinished answers, best first.

        Source: transformers, `_check_early_stop_heuristic` and the code after its call.
        """
        if not running:
            return True
        if sum(answer.is_complete for answer in self.finished) < self.search.beams:
            return False
        if self.search.early_stopping == "yes":
            return True
        # With a positive penalty, the score of an answer improves with its length.
        assumes_longest = self.search.early_stopping == "never" and self.search.length_penalty > 0
        max_length = self.ledger.size if self.limit == math.inf else self.limit
        length = max(max_length, len(self.steps) + 1) if assumes_longest else len(self.steps) + 1
        best_possible: float = running[0][0].score / length**self.search.length_penalty
        return best_possible <= self.finished[-1].score

    def _extend_beams(self, running: list[tuple[BeamCandidate, Detokenizer]]) -> None:
        """Replace the beams by their continuations `running`. Each continuation gets a slot that
        shares the cells of the beam that it extends.
        """
        parents = {candidate.beam for candidate, _ in running}
        self.free_slots += [
            beam.slot for number, beam in enumerate(self.beams) if number not in parents
        ]
        children, continued = [], set()  # `continued`: indices of beams whose slot is taken
        for candidate, decoder in running:
            parent = self.beams[candidate.beam]
            slot = parent.slot
            if candidate.beam in continued:
                slot = self.free_slots.pop()
                self.ledger.fork(parent.slot, slot)
            continued.add(candidate.beam)
            node = BeamNode(parent.node, candidate.token, candidate.logprob)
            children.append(
                Beam(
                    slot,
                    candidate.score,
                    node,
                    decoder,
                    self._child_branch(parent, candidate.token),
                )
            )
        for slot in self.free_slots:
            self.ledger.trim(slot, 0)
        self._close_branches(self.beams)
        self.beams = children

    def _child_branch(self, parent: Beam, token: int) -> GrammarBranch | None:
        """Return the grammar state of the beam's answer extended by `token`, or None without a
        grammar. The time is added to `grammar_seconds`.
        """
        if parent.branch is None:
            return None
        start_time = time.perf_counter()
        branch = parent.branch.child(token, self.vocabulary.piece(token))
        self.grammar_seconds += time.perf_counter() - start_time
        return branch

    def _close_branches(self, beams: list[Beam]) -> None:
        """Free the grammar states of these beams."""
        for beam in beams:
            if beam.branch:
                beam.branch.close()

    def _build_answer(self, finished: FinishedBeam) -> tuple[Hypothesis, list[TokenTime]]:
        """Return a finished answer with its text, and a TokenTime for each of its tokens. The token
        number n gets the times of step n of the search.
        """
        nodes = _path(finished.node)
        if self.vocabulary.is_end(nodes[-1].token):
            nodes.pop()
        decoder = Detokenizer(self.request.stops)
        texts = [decoder.feed(self.vocabulary.piece(node.token)) for node in nodes]
        tail = decoder.finish()
        times = [
            TokenTime(node.token, text, *step[:3], node.logprob, step.constraint_ms)
            for node, text, step in zip(nodes, texts, self.steps, strict=False)
        ]
        return Hypothesis(
            "".join(texts) + tail,
            finished.score,
            tuple(node.token for node in nodes),
            finished.is_complete,
        ), times


def _path(node: BeamNode | None) -> list[BeamNode]:
    """Return the nodes of an answer from its first token to `node`. Empty for None."""
    nodes: list[BeamNode] = []
    while node:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


STRATEGIES = (BeamSearch,)
