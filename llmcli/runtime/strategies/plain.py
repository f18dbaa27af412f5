"""One token after another, each drawn by the sampler chain."""

import math
import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import Row, Summing, make_chain
from llmcli.runtime.strategies.base import Means, end_tokens, refuse_nan
from llmcli.runtime.strategies.constrained_chain import guided
from llmcli.runtime.text.detokenizer import Decoder
from llmcli.types import Event, Finish


class Plain:
    """Draws tokens and decodes their text."""

    name: ClassVar[str] = "plain"
    slots = 1

    def __init__(self, request: Request, seed: int, means: Means) -> None:
        self.vocabulary = means.vocabulary
        chain = make_chain(request.sampling, seed, means.native, means.vocabulary)
        self.chain = guided(chain, request, self.vocabulary.piece)
        # The log-sum must be computed before forbidden ends are written to the row.
        self.summing = (
            self.chain if isinstance(self.chain, Summing) and not request.ignore_eos else None
        )
        self.decoder = Decoder(request.stops)
        # logit of the last drawn token, close to the largest logit of the next row
        self.near = math.nan

    def pending(self) -> list[tuple[int, int]]:
        """Return no rows: the last drawn token is in the sequence and is computed from there."""
        return []

    def accept(
        self, sequence: Sequence, rows: Iterator[Row], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw a token from the single row."""
        row, request, replayed = next(rows), sequence.request, sequence.known
        if not sequence.times:
            refuse_nan(row)
        if request.max_tokens == 0:
            return [], "length"
        if replayed.finish and len(sequence.times) == len(replayed.tokens):
            return [], replayed.finish
        # Before the draw: the first scan of the row waits for memory, and this one computes
        # meanwhile.
        log_sum = None
        if request.logprobs:
            log_sum = (
                self.summing.log_sum(row, self.near) if self.summing else row.log_sum(self.near)
            )
        begun = time.perf_counter()
        token = (self._draw_no_end if request.ignore_eos else self.chain.draw)(row, sequence.tokens)
        if len(sequence.times) < len(replayed.tokens):
            token = replayed.tokens[len(sequence.times)]
        ended = not request.ignore_eos and self.vocabulary.ends(token)
        if ended and not request.scores:
            return [], "stop"
        sample = time.perf_counter() - begun
        logprob = None
        if log_sum is not None:
            self.near = row.logits.item(token)
            logprob = self.near - log_sum
            if request.top_logprobs:
                sequence.rank(row.logits, log_sum)
        sequence.tokens.append(token)
        text = self.decoder.feed(self.vocabulary.piece(token))
        top = sequence.top[-1] if request.logprobs and request.top_logprobs else ()
        event = Event(
            sequence.id, sequence.time(token, text, spent, sample, logprob), text, top=top
        )
        if ended or self.decoder.stopped:
            return [event], "stop"
        return [event], "length" if len(sequence.times) == request.max_tokens else None

    def _draw_no_end(self, row: Row, tokens: list[int]) -> int:
        """Draw with all end tokens forbidden, as llama.cpp does, and restore the row for other
        readers.
        """
        ends = end_tokens(self.vocabulary)
        before = row.logits[ends]
        row.logits[ends] = -np.inf
        token = self.chain.draw(row, tokens)
        row.logits[ends] = before
        return token

    def shortened(self, sequence: Sequence) -> None:
        """Do nothing: a chain remembers what it drew and looks back from the end of the tokens."""

    def make_way(self, sequence: Sequence, cells: int) -> None:
        """Fail: the engine shortens a sequence with one slot itself."""
        raise AssertionError("an answer has one slot")

    def restart(self, sequence: Sequence) -> None:
        """Fail: the cells of one slot are swapped or recomputed."""
        raise AssertionError("an answer has one slot")

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Return the text held back: an incomplete character, or the start of a possible stop
        string.
        """
        self.chain.close()
        return self.decoder.finish()


STRATEGIES = (Plain,)
