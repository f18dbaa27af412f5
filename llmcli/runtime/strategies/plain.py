"""One token after another, each drawn by the sampler chain."""

import math
import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits, SummingChain, make_chain
from llmcli.runtime.strategies.base import StrategyResources, end_tokens, refuse_nan
from llmcli.runtime.strategies.constrained_chain import guide_chain
from llmcli.runtime.text.detokenizer import Detokenizer
from llmcli.types import Event, Finish


class PlainStrategy:
    """Draws tokens and decodes their text."""

    name: ClassVar[str] = "plain"
    slots = 1

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        self.vocabulary = resources.vocabulary
        chain = make_chain(request.sampling, seed, resources.native, resources.vocabulary)
        self.chain = guide_chain(chain, request, self.vocabulary.piece)
        # The log-sum must be computed before forbidden ends are written to the row.
        self.summing_chain = (
            self.chain if isinstance(self.chain, SummingChain) and not request.ignore_eos else None
        )
        self.decoder = Detokenizer(request.stops)
        # logit of the last drawn token, close to the largest logit of the next row
        self.last_logit = math.nan

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return no rows: the last drawn token is in the sequence and is computed from there."""
        return []

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw a token from the single row."""
        row, request, replayed = next(rows), sequence.request, sequence.replayed
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
                self.summing_chain.log_sum(row, self.last_logit)
                if self.summing_chain
                else row.log_sum(self.last_logit)
            )
        begun = time.perf_counter()
        token = (self._draw_no_end if request.ignore_eos else self.chain.draw)(row, sequence.tokens)
        if len(sequence.times) < len(replayed.tokens):
            token = replayed.tokens[len(sequence.times)]
        ended = not request.ignore_eos and self.vocabulary.is_end(token)
        if ended and not request.score_prompt:
            return [], "stop"
        sample = time.perf_counter() - begun
        logprob = None
        if log_sum is not None:
            self.last_logit = row.logits.item(token)
            logprob = self.last_logit - log_sum
            if request.top_logprobs:
                sequence.record_top_logprobs(row.logits, log_sum)
        sequence.tokens.append(token)
        text = self.decoder.feed(self.vocabulary.piece(token))
        top = sequence.top_logprobs[-1] if request.logprobs and request.top_logprobs else ()
        event = Event(
            sequence.id,
            sequence.record_token(token, text, pass_seconds, sample, logprob),
            text,
            top_logprobs=top,
        )
        if ended or self.decoder.is_stopped:
            return [event], "stop"
        return [event], "length" if len(sequence.times) == request.max_tokens else None

    def _draw_no_end(self, row: RowLogits, tokens: list[int]) -> int:
        """Draw with all end tokens forbidden, as llama.cpp does, and restore the row for other
        readers.
        """
        ends = end_tokens(self.vocabulary)
        before = row.logits[ends]
        row.logits[ends] = -np.inf
        token = self.chain.draw(row, tokens)
        row.logits[ends] = before
        return token

    def on_context_shift(self, sequence: Sequence) -> None:
        """Do nothing: a chain remembers what it drew and looks back from the end of the tokens."""

    def apply_overflow(self, sequence: Sequence, max_cells: int) -> None:
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


STRATEGIES = (PlainStrategy,)
