"""Beam search: the k likeliest answers are extended at once, on shared cells.

Which beams are kept, finished and ended follows transformers (generation/utils.py, `_beam_search`).
Among equal scores the lowest beam comes first, then the lowest token id; beams are numbered from
the likeliest, and among equal finished answers the one found first wins. (torch.topk leaves that
open.)

Inside a grammar illegal tokens get the log-probability -inf and the others keep theirs, as with a
LogitsProcessor (constrained_beam.py). An answer that the grammar does not accept, because the limit
came first, ranks after all that it accepts. Forced text is computed token by token.

A beam is a slot of the ledger. A parent's first child stays in its slot; each further child takes
the slot of a beam without children, which then shares the parent's cells.
"""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from llmcli.runtime.requests.repetition import EVERY, repeats
from llmcli.runtime.requests.request import Hypothesis, Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import Row
from llmcli.runtime.sampling.top_logprobs import floor
from llmcli.runtime.strategies.base import Means, end_tokens, refuse_nan
from llmcli.runtime.strategies.beam_overflow import Regrowth, seen
from llmcli.runtime.strategies.constrained_beam import Branch, begin
from llmcli.runtime.strategies.constrained_chain import nowhere
from llmcli.runtime.text.detokenizer import Decoder
from llmcli.types import Event, Finish, TokenTime

SLACK = 1e-3  # logits this much below the threshold are considered, too, because sums round


@dataclass(frozen=True, slots=True)
class Node:
    """A token of an answer and the tokens before it; beams share their beginnings."""

    parent: "Node | None"
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished answer: its slot, the sum of its log-probabilities, its last token, the decoder
    of its text, and its state in the grammar, if there is one.
    """

    slot: int
    score: float
    node: Node | None
    decoder: Decoder
    branch: Branch | None

    def whole(self) -> bool:
        """Return whether the answer may end here."""
        return self.branch is None or self.branch.accepting


class Candidate(NamedTuple):
    """A possible next token of a beam; a tuple, because its order is the order of preference and
    sorts fast.
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
class Ended:
    """A finished answer; the score includes the length penalty. `is_complete`: the grammar accepts
    it, or there is none.
    """

    whole: bool
    score: float
    node: Node
    finish: Finish


class Step(NamedTuple):
    """How the time of a pass was spent, in milliseconds."""

    ms: float
    decode_ms: float
    sample_ms: float
    constraint_ms: float


class BeamSearch:
    """Extends `search.beams` answers and keeps as many finished ones."""

    name: ClassVar[str] = "beam"

    def __init__(self, request: Request, seed: int, means: Means) -> None:
        self.request, self.search, self.slots = request, request.search, request.search.beams
        self.vocabulary, self.ledger = means.vocabulary, means.ledger
        # As many as the context holds, unless tokens may be dropped; the last token of an answer is
        # never computed.
        self.room = means.ledger.size - len(request.tokens) + 1
        most = math.inf if request.overflow else self.room
        self.limit = most if request.max_tokens is None else min(request.max_tokens, most)
        self._begin()

    def _begin(self) -> None:
        self.regrowth = Regrowth(self.ledger)
        self.beams: list[Beam] = []
        self.free: list[int] = []  # slots without a beam
        self.ended: list[Ended] = []  # best first, at most as many as beams
        self.steps: list[Step] = []
        self.guiding = 0.0  # seconds in the grammar since the last step
        self.near = float("nan")

    def pending(self) -> list[tuple[int, int]]:
        """Return the last token of every beam."""
        return [(beam.slot, beam.node.token) for beam in self.beams if beam.node]

    def accept(
        self, sequence: Sequence, rows: Iterator[Row], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Extend the beams by one token. Nothing is shown before the end."""
        if self.regrowth.busy:
            next(rows)  # these logits were read before the context was shortened
            self.regrowth.grown(sequence)
            return [], None
        begun = time.perf_counter()
        if not self.steps:
            first = Beam(sequence.slot, 0.0, None, Decoder(self.request.stops), begin(self.request))
            self.beams, self.free = [first], sequence.spare[:]
        if self.limit == 0:
            return [], "length"
        read = [next(rows) for _ in self.beams]
        if not self.steps:
            refuse_nan(read[0])
            spent = sequence.prompt_seconds
        running = self._sort_out(read)
        is_over = self._over(running)
        if is_over:
            self._close(self.beams)
            self.beams = []
        else:
            self._descend(running)
        now = time.perf_counter()
        search_seconds = now - begun - self.guiding
        self.steps.append(
            Step((now - sequence.last) * 1e3, spent * 1e3, search_seconds * 1e3, self.guiding * 1e3)
        )
        sequence.last, self.guiding = now, 0.0
        if is_over and not self.ended:
            raise nowhere()
        if is_over:
            return [], self.ended[0].finish
        return [], "repetition" if self._repeats(sequence) else None

    def _repeats(self, sequence: Sequence) -> bool:
        """Return whether the best answer only repeats itself. Without overflow the context limits
        it anyway.
        """
        if not self.request.overflow or len(self.steps) < sequence.look_at:
            return False
        sequence.look_at = len(self.steps) + EVERY
        answer = b"".join(self.vocabulary.piece(node.token) for node in _path(self.beams[0].node))
        return repeats([answer.decode("utf-8", "replace")])

    def shortened(self, sequence: Sequence) -> None:
        """Fail: `apply_overflow` is called instead."""
        raise AssertionError("beams take as many slots as there are")

    def make_way(self, sequence: Sequence, cells: int) -> None:
        """Drop the same tokens from all beams of a full context. The beams may use `max_cells`."""
        if self.request.overflow:
            heads = dict(self.pending())
            self.regrowth.shorten(sequence, self.request.overflow, heads, cells)

    def restart(self, sequence: Sequence) -> None:
        """Start again from the prompt: nothing was shown yet, and the result is the same."""
        self._close(self.beams)
        self._begin()
        sequence.restart()

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Return the best answer's text. When the search was cut short, unfinished answers count as
        they are.
        """
        if finish in ("cancelled", "context_full", "repetition") and self.steps:
            for beam in self.beams:
                if beam.node:
                    self._keep(Ended(beam.whole(), beam.score, beam.node, finish), len(self.steps))
        self._close(self.beams)
        answers = [self._answer(ended) for ended in self.ended]
        sequence.beams = tuple(hypothesis for hypothesis, _ in answers)
        best, times = answers[0] if answers else (Hypothesis("", 0.0, ()), [])
        sequence.times += times
        if sequence.slot >= 0 and sequence.spare:
            slots = [sequence.slot, *sequence.spare]
            sequence.slot, sequence.spare = (
                self.ledger.settle(slots, seen(sequence, best.tokens)),
                [],
            )
        return best.text

    def _sort_out(self, rows: list[Row]) -> list[tuple[Candidate, Decoder]]:
        """Record the finished answers among the best tokens. Return the others, at most as many as
        beams.
        """
        width, wanted = self.search.beams, 2 * self.search.beams
        log_sums = []
        for row in rows:
            log_sums.append(row.log_sum(self.near))
            self.near = log_sums[-1]
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
                node = Node(beam.node, candidate.token, candidate.logprob)
                self._keep(
                    Ended(
                        self._whole(beam, candidate.token, finish), candidate.score, node, finish
                    ),
                    len(self.steps) + 1,
                )
        return running[:width]

    def _forbid(self, rows: list[Row]) -> None:
        """Write -inf for tokens that the beams' grammars forbid. Each row belongs to one beam."""
        if self.request.grammar is None:
            return
        begun = time.perf_counter()
        for beam, row in zip(self.beams, rows, strict=True):
            if beam.branch:
                beam.branch.forbid(row.logits, end_tokens(self.vocabulary))
        self.guiding += time.perf_counter() - begun

    def _whole(self, beam: Beam, token: int, finish: Finish) -> bool:
        """Return whether an answer that ends with `token` is complete in the grammar."""
        if beam.branch is None or self.vocabulary.ends(
            token
        ):  # a forbidden end token is never a candidate
            return True
        if finish == "stop":  # at a stop string, which is cut off
            return False
        branch = beam.branch.child(token, self.vocabulary.piece(token))
        accepting = branch.accepting
        branch.close()
        return accepting

    def _best(
        self, rows: list[Row], offsets: list[float], sums: list[float], count: int
    ) -> list[Candidate]:
        """Return the `count` best continuations of all beams, best first. A token adds its
        log-softmax to its beam's score.
        """
        best: list[Candidate] = []
        for beam, (row, offset, total) in enumerate(zip(rows, offsets, sums, strict=True)):
            logits = row.logits
            # once enough are found, nothing below the last of them can be among the best
            threshold = (
                -best[-1].cost - offset - SLACK if len(best) == count else floor(logits, count)
            )
            ids = np.flatnonzero(logits >= max(threshold, float(np.finfo(np.float32).min)))
            values = logits[ids].tolist()
            best += [
                Candidate(-(offset + value), beam, token, value - total)
                for token, value in zip(ids.tolist(), values, strict=True)
            ]
            best.sort()
            del best[count:]
        return best

    def _ignored(self, token: int) -> bool:
        return self.request.ignore_eos and self.vocabulary.ends(token)

    def _ends(self, candidate: Candidate) -> tuple[Decoder, Finish | None]:
        """Return the decoder after this token, and the finish if the answer ends there."""
        decoder = self.beams[candidate.beam].decoder
        if self.vocabulary.ends(candidate.token):
            return decoder, "stop"
        if decoder.stops:
            decoder = copy.copy(decoder)
            decoder.feed(self.vocabulary.piece(candidate.token))
            if decoder.stopped:
                return decoder, "stop"
        if len(self.steps) + 1 < self.limit:
            return decoder, None
        return decoder, "length" if self.limit == self.request.max_tokens else "context_full"

    def _keep(self, ended: Ended, length: int) -> None:
        """Add a finished answer whose score is still the sum over `length` tokens, and keep the
        best ones.
        """
        self.ended.append(replace(ended, score=ended.score / length**self.search.length_penalty))
        self.ended.sort(
            key=lambda answer: (not answer.whole, -answer.score)
        )  # stable: the answer found first stays first
        del self.ended[self.search.beams :]

    def _over(self, running: list[tuple[Candidate, Decoder]]) -> bool:
        """Return whether no better answer can be found (`_check_early_stop_heuristic` and the code
        after it).
        """
        if not running:
            return True
        if sum(ended.whole for ended in self.ended) < self.search.beams:
            return False
        if self.search.early_stopping == "yes":
            return True
        longest = self.search.early_stopping == "never" and self.search.length_penalty > 0
        most = self.ledger.size if self.limit == math.inf else self.limit
        length = max(most, len(self.steps) + 1) if longest else len(self.steps) + 1
        reachable: float = running[0][0].score / length**self.search.length_penalty
        return reachable <= self.ended[-1].score

    def _descend(self, running: list[tuple[Candidate, Decoder]]) -> None:
        """Replace the beams by their children, each with a slot that holds its parent's cells."""
        parents = {candidate.beam for candidate, _ in running}
        self.free += [beam.slot for number, beam in enumerate(self.beams) if number not in parents]
        children, placed = [], set()
        for candidate, decoder in running:
            parent = self.beams[candidate.beam]
            slot = parent.slot
            if candidate.beam in placed:
                slot = self.free.pop()
                self.ledger.fork(parent.slot, slot)
            placed.add(candidate.beam)
            node = Node(parent.node, candidate.token, candidate.logprob)
            children.append(
                Beam(slot, candidate.score, node, decoder, self._grown(parent, candidate.token))
            )
        for slot in self.free:
            self.ledger.trim(slot, 0)
        self._close(self.beams)
        self.beams = children

    def _grown(self, parent: Beam, token: int) -> Branch | None:
        """Return the state in the grammar after one more token."""
        if parent.branch is None:
            return None
        begun = time.perf_counter()
        branch = parent.branch.child(token, self.vocabulary.piece(token))
        self.guiding += time.perf_counter() - begun
        return branch

    def _close(self, beams: list[Beam]) -> None:
        for beam in beams:
            if beam.branch:
                beam.branch.close()

    def _answer(self, ended: Ended) -> tuple[Hypothesis, list[TokenTime]]:
        """Return a finished answer as text, and each token with the times of the step in which it
        was found.
        """
        nodes = _path(ended.node)
        if self.vocabulary.ends(nodes[-1].token):
            nodes.pop()
        decoder = Decoder(self.request.stops)
        texts = [decoder.feed(self.vocabulary.piece(node.token)) for node in nodes]
        tail = decoder.finish()
        times = [
            TokenTime(node.token, text, *step[:3], node.logprob, step.constraint_ms)
            for node, text, step in zip(nodes, texts, self.steps, strict=False)
        ]
        return Hypothesis(
            "".join(texts) + tail, ended.score, tuple(node.token for node in nodes), ended.whole
        ), times


def _path(node: Node | None) -> list[Node]:
    """Return the tokens of an answer from the first to this one."""
    nodes: list[Node] = []
    while node:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


STRATEGIES = (BeamSearch,)
