"""One token after another, each drawn by the sampler chain."""

import math
import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits, SummingChain, make_chain
from llmcli.runtime.sampling.top_logprobs import TokenLogprob
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
        # With ignore_eos the row changes between the log-sum and the draw, so one scan cannot serve
        # for both.
        self.summing_chain = (
            self.chain if isinstance(self.chain, SummingChain) and not request.ignore_eos else None
        )
        self.decoder = Detokenizer(request.stops)
        # logit of the last drawn token, close to the largest logit of the next row
        self.last_logit = math.nan

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return no rows, because the last drawn token is in `Sequence.tokens` and is computed from
        there.
        """
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
        # The log-sum comes before the draw: the first scan of a row waits for memory, and the
        # log-sum has computations to do during the wait.
        log_sum = self._log_sum(row) if request.logprobs else None
        begun = time.perf_counter()
        token = self._draw(row, sequence)
        is_end = not request.ignore_eos and self.vocabulary.is_end(token)
        if is_end and not request.score_prompt:
            return [], "stop"
        sample_seconds = time.perf_counter() - begun
        event = self._record(sequence, row, token, log_sum, pass_seconds, sample_seconds)
        return [event], self._finish_reason(sequence, is_end)

    def _log_sum(self, row: RowLogits) -> float:
        if self.summing_chain:
            return self.summing_chain.log_sum(row, self.last_logit)
        return row.log_sum(self.last_logit)

    def _draw(self, row: RowLogits, sequence: Sequence) -> int:
        """Draw a token. Return it, or the token that another process has already sent at this
        position.
        """
        draw = self._draw_no_end if sequence.request.ignore_eos else self.chain.draw
        token = draw(row, sequence.tokens)
        replayed, n_tokens = sequence.replayed.tokens, len(sequence.times)
        return replayed[n_tokens] if n_tokens < len(replayed) else token

    def _record(
        self,
        sequence: Sequence,
        row: RowLogits,
        token: int,
        log_sum: float | None,
        pass_seconds: float,
        sample_seconds: float,
    ) -> Event:
        """Add a token to the answer. Return its event."""
        logprob = None
        top_logprobs: tuple[TokenLogprob, ...] = ()
        if log_sum is not None:
            self.last_logit = row.logits.item(token)
            logprob = self.last_logit - log_sum
            if sequence.request.top_logprobs:
                sequence.record_top_logprobs(row.logits, log_sum)
                top_logprobs = sequence.top_logprobs[-1]
        sequence.tokens.append(token)
        text = self.decoder.feed(self.vocabulary.piece(token))
        token_time = sequence.record_token(token, text, pass_seconds, sample_seconds, logprob)
        return Event(sequence.id, token_time, text, top_logprobs=top_logprobs)

    def _finish_reason(self, sequence: Sequence, is_end: bool) -> Finish | None:
        if is_end or self.decoder.is_stopped:
            return "stop"
        return "length" if len(sequence.times) == sequence.request.max_tokens else None

    def _draw_no_end(self, row: RowLogits, tokens: list[int]) -> int:
        """Draw with all end tokens forbidden, as llama.cpp does, and restore the row for later
        readers.
        """
        ends = end_tokens(self.vocabulary)
        before = row.logits[ends]
        row.logits[ends] = -np.inf
        token = self.chain.draw(row, tokens)
        row.logits[ends] = before
        return token

    def on_context_shift(self, sequence: Sequence) -> None:
        """Do nothing: what a chain remembers does not depend on positions in the text."""

    def apply_overflow(self, sequence: Sequence, max_cells: int) -> None:
        """Raise AssertionError, because the engine itself shortens a sequence with one slot."""
        raise AssertionError("an answer has one slot")

    def restart(self, sequence: Sequence) -> None:
        """Raise AssertionError, because a preempted sequence with one slot is swapped or
        recomputed, not restarted.
        """
        raise AssertionError("an answer has one slot")

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Return the text that was held back: an incomplete character, or the start of a possible
        stop string.
        """
        self.chain.close()
        return self.decoder.finish()


STRATEGIES = (PlainStrategy,)
