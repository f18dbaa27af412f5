"""Beam search: the k likeliest answers are extended at once, on shared cells.

The rules by which beams are kept and finished, and by which the search ends, follow transformers
(generation/utils.py, `_beam_search`). Among equal scores the lowest beam comes first, then the
lowest token id; beams are numbered from the likeliest. Among finished answers with equal scores the
one found first comes first. (torch.topk leaves the order of equal scores open.)

Inside a grammar illegal tokens get the log-probability -inf and the others keep theirs, as with a
LogitsProcessor (constrained_beam.py). An answer that reaches the length limit before the grammar
accepts it ranks after all accepted answers. Forced text is computed token by token.

Each beam has a slot of the ledger. A parent's first child stays in its slot; each further child
takes the slot of a beam without children, which then shares the parent's cells.
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
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.sampling.top_logprobs import top_threshold
from llmcli.runtime.strategies.base import StrategyResources, end_tokens, refuse_nan
from llmcli.runtime.strategies.beam_overflow import BranchRecompute, context_tokens
from llmcli.runtime.strategies.constrained_beam import GrammarBranch, start_branch
from llmcli.runtime.strategies.constrained_chain import dead_end_error
from llmcli.runtime.text.detokenizer import Detokenizer
from llmcli.types import Event, Finish, TokenTime

# logits this far below the threshold are also considered, because sums are rounded
LOGIT_SLACK = 1e-3


@dataclass(frozen=True, slots=True)
class BeamNode:
    """A token of an answer, linked to the token before it. Beams with a common beginning share its
    nodes.
    """

    parent: "BeamNode | None"
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished answer: its slot, the sum of its log-probabilities, its last token, the decoder
    of its text, and its state in the grammar, if there is one.
    """

    slot: int
    score: float
    node: BeamNode | None
    decoder: Detokenizer
    branch: GrammarBranch | None

    def is_complete(self) -> bool:
        """Return whether the answer may end here."""
        return self.branch is None or self.branch.is_accepting


class BeamCandidate(NamedTuple):
    """A possible next token of a beam. It is a tuple with the cost first, so candidates sort fast
    and in order of preference.
    """

    cost: float  # minus the score
    beam: int
    token: int
    logprob: float

    @property
    def score(self) -> float:
        """Return the sum of log-probabilities."""
        return -self.cost


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished answer. `score` includes the length penalty. `is_complete`: the grammar accepts
    the answer, or there is no grammar.
    """

    is_complete: bool
    score: float
    node: BeamNode
    finish: Finish


class BeamStepTimes(NamedTuple):
    """The time of one step of the search and its parts, in milliseconds."""

    ms: float
    decode_ms: float
    sample_ms: float
    constraint_ms: float


class BeamSearch:
    """Extends `search.beams` answers at once, and keeps up to as many finished ones."""

    name: ClassVar[str] = "beam"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        self.request, self.search, self.slots = request, request.search, request.search.beams
        self.vocabulary, self.ledger = resources.vocabulary, resources.ledger
        # The context must hold the prompt and the answer without its last token, which is never
        # computed. The limit does not apply when tokens may be dropped.
        self.max_new_tokens = resources.ledger.size - len(request.tokens) + 1
        most = math.inf if request.overflow else self.max_new_tokens
        self.limit = most if request.max_tokens is None else min(request.max_tokens, most)
        self._begin()

    def _begin(self) -> None:
        self.recompute = BranchRecompute(self.ledger)
        self.beams: list[Beam] = []
        self.free_slots: list[int] = []  # slots without a beam
        self.finished: list[FinishedBeam] = []  # best first, at most as many as beams
        self.steps: list[BeamStepTimes] = []
        self.grammar_seconds = 0.0  # seconds in the grammar since the last step
        self.last_log_sum = float("nan")

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return the slot and the last token of every beam."""
        return [(beam.slot, beam.node.token) for beam in self.beams if beam.node]

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Extend the beams by one token. The result contains no events, because nothing is shown
        before the end of the search.
        """
        if self.recompute.is_busy:
            next(rows)  # the logits of this row were read already, before the context was shortened
            self.recompute.finish_beam(sequence)
            return [], None
        begun = time.perf_counter()
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
        read = [next(rows) for _ in self.beams]
        if not self.steps:
            refuse_nan(read[0])
            pass_seconds = sequence.accounting.prompt_seconds
        running = self._sort_out(read)
        is_over = self._over(running)
        if is_over:
            self._close(self.beams)
            self.beams = []
        else:
            self._descend(running)
        now = time.perf_counter()
        search_seconds = now - begun - self.grammar_seconds
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
        return [], "repetition" if self._repeats(sequence) else None

    def _repeats(self, sequence: Sequence) -> bool:
        """Return whether the best answer only repeats itself. This is checked only if tokens may be
        dropped from a full context; otherwise the context limits the answer.
        """
        if not self.request.overflow or len(self.steps) < sequence.repetition_check_at:
            return False
        sequence.repetition_check_at = len(self.steps) + TOKENS_BETWEEN_CHECKS
        answer = b"".join(self.vocabulary.piece(node.token) for node in _path(self.beams[0].node))
        return is_repetitive([answer.decode("utf-8", "replace")])

    def on_context_shift(self, sequence: Sequence) -> None:
        """Raise AssertionError, because the engine calls `apply_overflow` for beams."""
        raise AssertionError("beams take as many slots as there are")

    def apply_overflow(self, sequence: Sequence, max_cells: int) -> None:
        """Drop the same tokens from all beams of a full context. The beams may use `max_cells`."""
        if self.request.overflow:
            heads = dict(self.pending_rows())
            self.recompute.shorten(sequence, self.request.overflow, heads, max_cells)

    def restart(self, sequence: Sequence) -> None:
        """Start again from the prompt: nothing was shown yet, and the result is the same."""
        self._close(self.beams)
        self._begin()
        sequence.restart()

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Return the text of the best answer. When the search was cut short, unfinished answers are
        ranked together with finished ones.
        """
        if finish in ("cancelled", "context_full", "repetition") and self.steps:
            for beam in self.beams:
                if beam.node:
                    self._keep(
                        FinishedBeam(beam.is_complete(), beam.score, beam.node, finish),
                        len(self.steps),
                    )
        self._close(self.beams)
        answers = [self._answer(ended) for ended in self.finished]
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

    def _sort_out(self, rows: list[RowLogits]) -> list[tuple[BeamCandidate, Detokenizer]]:
        """Record the answers that end with one of the best tokens. Return the best continuations
        that do not end their answer, at most `search.beams` of them.
        """
        width, wanted = self.search.beams, 2 * self.search.beams
        log_sums = []
        for row in rows:
            log_sums.append(row.log_sum(self.last_log_sum))
            self.last_log_sum = log_sums[-1]
        self._forbid(rows)
        offsets = [beam.score - total for beam, total in zip(self.beams, log_sums, strict=True)]
        while True:
            candidates = self._best(rows, offsets, log_sums, wanted)
            checked = [
                (candidate, *self._ends(candidate))
                for candidate in candidates
                if not self._ignored(candidate.token)
            ]
            running = [
                (candidate, decoder) for candidate, decoder, finish in checked if finish is None
            ]
            enough = len(running) >= width or (
                len(self.steps) + 1 == self.limit and len(checked) >= width
            )
            if enough or len(candidates) < wanted:
                break
            wanted *= 2
        for candidate, _, finish in checked[:width]:
            if finish is not None:
                beam = self.beams[candidate.beam]
                node = BeamNode(beam.node, candidate.token, candidate.logprob)
                self._keep(
                    FinishedBeam(
                        self._whole(beam, candidate.token, finish), candidate.score, node, finish
                    ),
                    len(self.steps) + 1,
                )
        return running[:width]

    def _forbid(self, rows: list[RowLogits]) -> None:
        """Write -inf for tokens that the beams' grammars forbid. `rows`: one for each beam."""
        if self.request.grammar is None:
            return
        begun = time.perf_counter()
        for beam, row in zip(self.beams, rows, strict=True):
            if beam.branch:
                beam.branch.forbid(row.logits, end_tokens(self.vocabulary))
        self.grammar_seconds += time.perf_counter() - begun

    def _whole(self, beam: Beam, token: int, finish: Finish) -> bool:
        """Return whether the grammar accepts an answer of this beam that ends with `token`; True
        without a grammar.
        """
        if beam.branch is None or self.vocabulary.is_end(
            token
        ):  # an end token is a candidate only where the grammar accepts it
            return True
        # the answer is cut off before a stop string, so the grammar is not complete
        if finish == "stop":
            return False
        branch = beam.branch.child(token, self.vocabulary.piece(token))
        accepting = branch.is_accepting
        branch.close()
        return accepting

    def _best(
        self, rows: list[RowLogits], offsets: list[float], sums: list[float], count: int
    ) -> list[BeamCandidate]:
        """Return the `count` best continuations of all beams, best first. The score of a
        continuation is the beam's score plus the token's log-softmax.
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

    def _ignored(self, token: int) -> bool:
        return self.request.ignore_eos and self.vocabulary.is_end(token)

    def _ends(self, candidate: BeamCandidate) -> tuple[Detokenizer, Finish | None]:
        """Return the text decoder after this token, and the reason to finish if the answer ends
        there.
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

    def _keep(self, ended: FinishedBeam, length: int) -> None:
        """Add a finished answer, and keep only the best finished answers. Its `score` is still
        without the length penalty, which is applied for `length` tokens.
        """
        self.finished.append(replace(ended, score=ended.score / length**self.search.length_penalty))
        self.finished.sort(
            key=lambda answer: (not answer.is_complete, -answer.score)
        )  # the sort is stable, so among equals the answer found first comes first
        del self.finished[self.search.beams :]

    def _over(self, running: list[tuple[BeamCandidate, Detokenizer]]) -> bool:
        """Return whether the search is over, because no unfinished answer can still be among the
        best. `running`: the unfinished answers, best first.

        Source: transformers, `_check_early_stop_heuristic` and the code after its call.
        """
        if not running:
            return True
        if sum(ended.is_complete for ended in self.finished) < self.search.beams:
            return False
        if self.search.early_stopping == "yes":
            return True
        longest = self.search.early_stopping == "never" and self.search.length_penalty > 0
        most = self.ledger.size if self.limit == math.inf else self.limit
        length = max(most, len(self.steps) + 1) if longest else len(self.steps) + 1
        reachable: float = running[0][0].score / length**self.search.length_penalty
        return reachable <= self.finished[-1].score

    def _descend(self, running: list[tuple[BeamCandidate, Detokenizer]]) -> None:
        """Replace the beams by their children. Each child gets a slot with the cells of its parent."""
        parents = {candidate.beam for candidate, _ in running}
        self.free_slots += [
            beam.slot for number, beam in enumerate(self.beams) if number not in parents
        ]
        children, placed = [], set()
        for candidate, decoder in running:
            parent = self.beams[candidate.beam]
            slot = parent.slot
            if candidate.beam in placed:
                slot = self.free_slots.pop()
                self.ledger.fork(parent.slot, slot)
            placed.add(candidate.beam)
            node = BeamNode(parent.node, candidate.token, candidate.logprob)
            children.append(
                Beam(slot, candidate.score, node, decoder, self._grown(parent, candidate.token))
            )
        for slot in self.free_slots:
            self.ledger.trim(slot, 0)
        self._close(self.beams)
        self.beams = children

    def _grown(self, parent: Beam, token: int) -> GrammarBranch | None:
        """Return the state in the grammar after the beam's answer is extended by `token`."""
        if parent.branch is None:
            return None
        begun = time.perf_counter()
        branch = parent.branch.child(token, self.vocabulary.piece(token))
        self.grammar_seconds += time.perf_counter() - begun
        return branch

    def _close(self, beams: list[Beam]) -> None:
        for beam in beams:
            if beam.branch:
                beam.branch.close()

    def _answer(self, ended: FinishedBeam) -> tuple[Hypothesis, list[TokenTime]]:
        """Return a finished answer as text, and each token with the times of the step in which it
        was found.
        """
        nodes = _path(ended.node)
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
            ended.score,
            tuple(node.token for node in nodes),
            ended.is_complete,
        ), times


def _path(node: BeamNode | None) -> list[BeamNode]:
    """Return the nodes of an answer from the first one to `node`."""
    nodes: list[BeamNode] = []
    while node:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


STRATEGIES = (BeamSearch,)
