"""One token after the other, each drawn by the sampler chain."""

import math
import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from llmcli.runtime.constraint.chain import guided
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.chain import Row, Summing, make_chain
from llmcli.runtime.sequence import Sequence
from llmcli.runtime.strategies.base import Means, end_tokens, refuse_nan
from llmcli.runtime.text import Decoder
from llmcli.types import Event, Finish


class Plain:
    """Draws a token and shows its text."""

    name: ClassVar[str] = "plain"
    slots = 1

    def __init__(self, request: Request, seed: int, means: Means) -> None:
        self.vocabulary = means.vocabulary
        chain = make_chain(request.sampling, seed, means.native, means.vocabulary)
        self.chain = guided(chain, request, self.vocabulary.piece)
        # Where ends are forbidden they are written to the row between its log-sum and the draw.
        self.summing = (
            self.chain if isinstance(self.chain, Summing) and not request.ignore_eos else None
        )
        self.decoder = Decoder(request.stops)
        self.near = math.nan  # the logit of the last token drawn: about the largest of the next row

    def pending(self) -> list[tuple[int, int]]:
        """Nothing: the token drawn last stands in the sequence, to be computed."""
        return []

    def accept(
        self, sequence: Sequence, rows: Iterator[Row], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from the one row."""
        row, request, known = next(rows), sequence.request, sequence.known
        if not sequence.times:
            refuse_nan(row)
        if request.max_tokens == 0:
            return [], "length"
        if known.finish and len(sequence.times) == len(known.tokens):
            return [], known.finish
        # Before the draw: whoever reads the row first waits for the memory, and this one computes
        # meanwhile.
        log_sum = None
        if request.logprobs:
            log_sum = (
                self.summing.log_sum(row, self.near) if self.summing else row.log_sum(self.near)
            )
        begun = time.perf_counter()
        token = (self._draw_no_end if request.ignore_eos else self.chain.draw)(row, sequence.tokens)
        if len(sequence.times) < len(known.tokens):
            token = known.tokens[len(sequence.times)]
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
        """Draw with every end forbidden, as llama.cpp does; others may read the row, too: it is put
        right again.
        """
        ends = end_tokens(self.vocabulary)
        before = row.logits[ends]
        row.logits[ends] = -np.inf
        token = self.chain.draw(row, tokens)
        row.logits[ends] = before
        return token

    def shortened(self, sequence: Sequence) -> None:
        """Nothing: a chain knows what it drew, and looks back from the end of the tokens."""

    def make_way(self, sequence: Sequence, cells: int) -> None:
        """Never: the engine shortens what has one slot."""
        raise AssertionError("an answer has one slot")

    def restart(self, sequence: Sequence) -> None:
        """Never: what one slot holds is brought back or computed anew."""
        raise AssertionError("an answer has one slot")

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Half a character, or what looked like the beginning of a stop string."""
        self.chain.close()
        return self.decoder.finish()


STRATEGIES = (Plain,)
