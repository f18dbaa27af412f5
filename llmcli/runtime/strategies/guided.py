"""Plain decoding inside a grammar. Text that the grammar leaves no choice about is inserted without
sampling (jump-forward).

Such forced tokens are appended to the sequence like drawn ones, so repetition penalties count them.
The next forward pass computes them together: n forced tokens need one pass of n rows, and only the
last row gives logits.
"""

from collections.abc import Iterator
from typing import ClassVar

from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.strategies.base import StrategyResources
from llmcli.runtime.strategies.constrained_chain import GuidedChain
from llmcli.runtime.strategies.plain import PlainStrategy
from llmcli.types import Event, Finish

MAX_TAIL = 64  # how many forced tokens are looked ahead for the end of the answer


class GuidedStrategy(PlainStrategy):
    """Plain decoding, inside a grammar if the request has one. When the grammar is complete and
    allows no further text, the answer ends without another forward pass.
    """

    name: ClassVar[str] = "guided"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        super().__init__(request, seed, resources)
        self.guided_chain = self.chain if isinstance(self.chain, GuidedChain) else None
        self.jump = request.grammar.constraint.jump if request.grammar else "off"
        self.exact_rows = resources.exact_rows
        self.n_dropped = 0  # tokens that were dropped from the sequence so far

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw a token from the single row, then append the tokens that the grammar forces after
        it. Return the events of all these tokens, and the reason to finish if the answer ends.
        """
        events, finish = super().accept(sequence, rows, pass_seconds)
        guided_chain = self.guided_chain
        if guided_chain is None:
            return events, finish
        if events and (drawn := events[0].token):
            # the measured sampling time includes the grammar's time inside the draw
            seconds, draw_seconds = guided_chain.pop_seconds()
            drawn = drawn._replace(
                sample_ms=drawn.sample_ms - draw_seconds * 1e3,
                constraint_ms=seconds * 1e3,
            )
            sequence.times[-len(events)] = drawn  # closed thinking may follow it
            events[0] = events[0]._replace(token=drawn)
        while events and finish is None and len(sequence.tokens) < self.max_tokens:
            forced, complete = self._forced_tokens(sequence, guided_chain)
            for token in forced:
                event, finish = self._append_forced(sequence, token, guided_chain.pop_seconds()[0])
                events.append(event)
                if finish or len(sequence.tokens) == self.max_tokens:
                    break
            # the matcher must read these tokens before any of them are dropped from a full context
            guided_chain.follow(sequence.tokens)
            if complete and finish is None and len(sequence.tokens) < self.max_tokens:
                return events, "stop"
            if not forced or self.jump != "fast":
                break
        return events, finish

    def _forced_tokens(
        self, sequence: Sequence, guided_chain: GuidedChain
    ) -> tuple[list[int], bool]:
        """Return the tokens that the grammar forces next, and whether they complete it.

        The next pass computes them together. In the mode "lossless" they must not change the logits
        of later tokens, so there are as many as such a pass may have, or all if no pass follows.
        """
        tokens = sequence.tokens
        forced, complete = guided_chain.forced_tokens(tokens, self.jump)
        if self.jump != "lossless" or complete:
            return forced, complete
        limit = self.exact_rows - 1
        more = forced
        while more and not complete and len(tokens) + len(forced) < self.max_tokens:
            more, complete = guided_chain.forced_tokens([*tokens, *forced], self.jump)
            if len(forced) > max(limit, MAX_TAIL):
                break
            forced = [*forced, *more]
        return (forced, True) if complete else (forced[:limit], False)

    def on_context_shift(self, sequence: Sequence) -> None:
        """Tell the chain how many tokens were dropped, because it counts positions in the text. The
        grammar's state still includes the dropped tokens.
        """
        if self.guided_chain:
            self.guided_chain.on_context_shift(
                sequence.overflow_stats.tokens - self.n_dropped, sequence.n_prompt
            )
        self.n_dropped = sequence.overflow_stats.tokens


STRATEGIES = (GuidedStrategy,)
