"""Plain decoding: each forward pass gives one row of logits, and the sampler chain draws one token
from it.
"""

import math
import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.requests.thinking import ThinkingTracker
from llmcli.runtime.sampling.chain import PlannedDraw, RowLogits, SummingChain, make_chain
from llmcli.runtime.sampling.top_logprobs import TokenLogprob
from llmcli.runtime.strategies.base import StrategyResources, end_tokens, refuse_nan
from llmcli.runtime.strategies.constrained_chain import guide_chain
from llmcli.runtime.text.detokenizer import Detokenizer
from llmcli.types import Event, Finish


class PlainStrategy:
    """Draws the tokens of one answer one at a time and decodes them to text."""

    name: ClassVar[str] = "plain"
    slots = 1

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        self.vocabulary = resources.vocabulary
        chain = make_chain(request.sampling, seed, resources.native, resources.vocabulary)
        self.chain = guide_chain(chain, request, self.vocabulary.piece)
        self.conditions = conditions = request.end_conditions
        # Computes the log-sum and the draw in one scan of the row. Where end tokens must not be
        # drawn, their logits change between the two, so they need separate scans.
        can_always_end = not request.ignore_eos and not conditions.min_tokens
        self.summing_chain = (
            self.chain if isinstance(self.chain, SummingChain) and can_always_end else None
        )
        native = resources.native
        self.banned_at_first: NDArray[np.int32] | None = None
        if conditions.min_tokens:
            ends = {*end_tokens(self.vocabulary).tolist(), *conditions.stop_tokens}
            self.banned_at_first = np.array(sorted(ends), np.int32)
        # The last token of an answer is never computed, so it needs no cell.
        self.max_tokens = resources.ledger.size + 1
        self.can_plan = native is not None and native.can_plan(self.chain)
        self.planned: PlannedDraw | None = None  # the draw of the next call of accept()
        self.decoder = Detokenizer(request.stops, conditions.min_indent)
        self.first_token_time = 0.0  # time.perf_counter() of the first token
        # logit of the last drawn token: an estimate of the largest logit of the next row
        self.last_logit = math.nan

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return an empty list: the engine finds the last drawn token in `Sequence.tokens`."""
        return []

    def plan_draw(self, sequence: Sequence, row: int) -> PlannedDraw | None:
        """Return the draw that accept() will make from the row with this number. Return None if
        another chain than llmcli's C code draws, if there is no draw, or for the first token,
        before which accept() checks the row.
        """
        request, replayed, n_tokens = sequence.request, sequence.replayed, len(sequence.times)
        ends_replay = replayed.finish and n_tokens == len(replayed.tokens)
        self.planned = None
        if not self.can_plan or not n_tokens or request.max_tokens == 0 or ends_replay:
            return None
        near = self.last_logit if request.logprobs and math.isfinite(self.last_logit) else None
        self.planned = PlannedDraw(
            self.chain, row, sequence.tokens, self._banned(sequence, n_tokens), near
        )
        return self.planned

    def next_token(self, sequence: Sequence) -> int | None:
        """Return the token of the planned draw. Return None if it was not drawn or ends the answer,
        if the answer has its last token then, or if log-probabilities are read from the row.
        """
        planned, request, n_tokens = self.planned, sequence.request, len(sequence.times)
        if planned is None or planned.token is None or request.logprobs:
            return None
        if n_tokens + 1 == request.max_tokens or n_tokens < len(sequence.replayed.tokens):
            return None
        return None if self._is_end(request, planned.token) else planned.token

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw one token from the single row of logits, and append it to the sequence. Return the
        token's event, and the reason to finish if the answer ends. An end token has no event,
        except when the request also scores its prompt.

        After a server process has ended, the tokens that it already sent replace the drawn ones;
        the draw still advances the state of the sampler chain.

        Raises UserError when the first row of the answer contains NaN.
        """
        row, request, replayed = next(rows), sequence.request, sequence.replayed
        planned, self.planned = self.planned, None
        assert planned is None or planned.row is None or planned.row is row
        if not sequence.times:
            refuse_nan(row)
        if request.max_tokens == 0:
            return [], "length"
        if replayed.finish and len(sequence.times) == len(replayed.tokens):
            return [], replayed.finish
        thinking = sequence.thinking
        if thinking is not None and thinking.is_due:
            return self._close_thinking(sequence, thinking)
        # The log-sum is computed before the draw: the first scan of a row waits for memory, and the
        # exponentials of the log-sum are computed during that wait.
        log_sum = planned.log_sum if planned else None
        banned = planned.banned if planned else self._banned(sequence, len(sequence.times))
        if request.logprobs and log_sum is None:
            log_sum = self._log_sum(row, may_sum=banned is None)
        drawn = planned.token if planned else None
        if planned is not None and drawn is not None:
            sample_seconds = planned.seconds
        else:
            begun = time.perf_counter()
            drawn = self._draw(row, sequence.tokens, banned)
            sample_seconds = time.perf_counter() - begun
        n_tokens = len(sequence.times)
        token = replayed.tokens[n_tokens] if n_tokens < len(replayed.tokens) else drawn
        is_end = self._is_end(request, token)
        if is_end and thinking is not None and thinking.is_bounded:
            return self._close_thinking(sequence, thinking)
        if is_end and not request.score_prompt:
            return [], "stop"
        event = self._record(sequence, row, token, log_sum, pass_seconds, sample_seconds)
        finish = self._finish_reason(sequence, is_end)
        if finish is None and thinking is not None and thinking.is_due:
            events, finish = self._close_thinking(sequence, thinking)
            return [event, *events], finish
        return [event], finish

    def _is_end(self, request: Request, token: int) -> bool:
        """Return whether a token ends the answer or its thinking."""
        return token in self.conditions.stop_tokens or (
            not request.ignore_eos and self.vocabulary.is_end(token)
        )

    def _close_thinking(
        self, sequence: Sequence, thinking: ThinkingTracker
    ) -> tuple[list[Event], Finish | None]:
        """Append the tokens that end the thinking. The next pass computes them together. Return
        their events, and the reason to finish if one of them ends the answer.
        """
        events: list[Event] = []
        finish: Finish | None = None
        for token in thinking.closing_tokens(sequence.request.grammar is not None):
            if finish is not None or len(sequence.tokens) >= self.max_tokens:
                break
            event, finish = self._append_forced(sequence, token)
            events.append(event)
        return events, finish

    def _append_forced(
        self, sequence: Sequence, token: int, grammar_seconds: float = 0.0
    ) -> tuple[Event, Finish | None]:
        """Append a forced token to the sequence. Return its event, and the reason to finish if a
        stop string or the token limit ends the answer.
        """
        sequence.tokens.append(token)
        piece = self.vocabulary.piece(token)
        if sequence.thinking is not None:
            sequence.thinking.feed(piece)
        text = self.decoder.feed(piece)
        event = Event(
            sequence.id,
            sequence.record_token(token, text, 0, 0, None, constraint=grammar_seconds, forced=True),
            text,
        )
        return event, self._finish_reason(sequence, is_end=False)

    def _log_sum(self, row: RowLogits, may_sum: bool) -> float:
        """Return the logarithm of the sum of exp(logit) over the row. `may_sum`: the draw reads the
        same logits, so that one scan serves both.
        """
        if self.summing_chain and may_sum:
            return self.summing_chain.log_sum(row, self.last_logit)
        return row.log_sum(self.last_logit)

    def _banned(self, sequence: Sequence, n_tokens: int) -> NDArray[np.int32] | None:
        """Return the tokens that must not be drawn after `n_tokens` tokens of the answer: those
        that would end it. Return None if all may be drawn.

        Shapes: result `[tokens]`.
        """
        if n_tokens < self.conditions.min_tokens:
            return self.banned_at_first
        request, thinking = sequence.request, sequence.thinking
        lacks_reply = thinking is not None and thinking.lacks_reply and request.grammar is None
        return end_tokens(self.vocabulary) if request.ignore_eos or lacks_reply else None

    def _record(
        self,
        sequence: Sequence,
        row: RowLogits,
        token: int,
        log_sum: float | None,
        pass_seconds: float,
        sample_seconds: float,
    ) -> Event:
        """Append `token` to the sequence with its text, its times and its log-probability. Return
        the token's event. `log_sum`: the log-sum of the row, or None without log-probabilities.
        """
        logprob = None
        top_logprobs: tuple[TokenLogprob, ...] = ()
        if log_sum is not None:
            self.last_logit = row.logits.item(token)
            logprob = self.last_logit - log_sum
            if sequence.request.top_logprobs:
                sequence.record_top_logprobs(row.logits, log_sum)
                top_logprobs = sequence.top_logprobs[-1]
        sequence.tokens.append(token)
        piece = self.vocabulary.piece(token)
        if sequence.thinking is not None:
            sequence.thinking.feed(piece)
        text = self.decoder.feed(piece)
        token_time = sequence.record_token(token, text, pass_seconds, sample_seconds, logprob)
        return Event(sequence.id, token_time, text, top_logprobs=top_logprobs)

    def _finish_reason(self, sequence: Sequence, is_end: bool) -> Finish | None:
        """Return the reason why the answer ends after the last token, or None if it goes on."""
        if is_end or self.decoder.is_stopped:
            return "stop"
        if len(sequence.times) == sequence.request.max_tokens or self.decoder.is_outdented:
            return "length"
        return "length" if self.conditions.line_limit_ms and self._is_late(sequence) else None

    def _is_late(self, sequence: Sequence) -> bool:
        """Return whether the last token ends a line after the time limit for lines."""
        if len(sequence.times) == 1:
            self.first_token_time = sequence.last_token_time
        elapsed = (sequence.last_token_time - self.first_token_time) * 1e3
        is_line_end = b"\n" in self.vocabulary.piece(sequence.tokens[-1])
        return is_line_end and elapsed > self.conditions.line_limit_ms

    def _draw(self, row: RowLogits, tokens: list[int], banned: NDArray[np.int32] | None) -> int:
        """Return the next token after `tokens`, drawn while the logits of the tokens in `banned`
        are -inf (llama.cpp's `ignore_eos`). Then restore these logits, because log-probabilities
        are read from them.

        Shapes: banned `[tokens]`.
        """
        if banned is None:
            return self.chain.draw(row, tokens)
        before = row.logits[banned]
        row.logits[banned] = -np.inf
        token = self.chain.draw(row, tokens)
        row.logits[banned] = before
        return token

    def on_context_shift(self, sequence: Sequence) -> None:
        """Do nothing: no state of a sampler chain depends on positions in the text."""

    def apply_overflow(self, sequence: Sequence, max_cells: int) -> None:
        """Raise AssertionError: the engine itself shortens a sequence that has a single slot."""
        raise AssertionError("an answer has one slot")

    def restart(self, sequence: Sequence) -> None:
        """Raise AssertionError: a preempted sequence that has a single slot is swapped out or
        recomputed, but never restarted.
        """
        raise AssertionError("an answer has one slot")

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """Free the sampler chain. Return the text that was held back: an incomplete character, or
        the start of a possible stop string.
        """
        self.chain.close()
        return self.decoder.finish()


STRATEGIES = (PlainStrategy,)
