"""One token after another inside a grammar. Forced text is inserted without sampling
(jump-forward).

Forced tokens are appended to the sequence like drawn ones, so penalties count them. They are
computed with the next pass: n forced tokens cost one pass of n rows, of which only the last gives
logits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.strategies.base import StrategyResources
from llmcli.runtime.strategies.constrained_chain import GuidedChain
from llmcli.runtime.strategies.plain import PlainStrategy
from llmcli.types import Event, Finish


class GuidedStrategy(PlainStrategy):
    """Plain decoding, inside a grammar if the request has one. When the grammar allows no further
    text, the answer ends without another pass.
    """

    name: ClassVar[str] = "guided"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        super().__init__(request, seed, resources)
        self.guide = self.chain if isinstance(self.chain, GuidedChain) else None
        self.jump = request.grammar.constraint.jump if request.grammar else "off"
        self.max_tokens = resources.ledger.size + 1  # the last token is never computed
        self.n_dropped = 0  # tokens dropped from the sequence

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw a token from the single row, then insert the forced text after it."""
        events, finish = super().accept(sequence, rows, pass_seconds)
        guide = self.guide
        if guide is None:
            return events, finish
        if events and (drawn := events[0].token):
            total, inside = guide.pop_seconds()
            drawn = replace(
                drawn, sample_ms=drawn.sample_ms - inside * 1e3, constraint_ms=total * 1e3
            )
            sequence.times[-1] = drawn
            events[0] = replace(events[0], token=drawn)
        while events and finish is None and len(sequence.tokens) < self.max_tokens:
            forced, complete = guide.forced_tokens(sequence.tokens, self.jump)
            if complete:
                return events, "stop"
            if not forced:
                break
            for token in forced:
                event, finish = self._take(sequence, token, guide.pop_seconds()[0])
                events.append(event)
                if finish or len(sequence.tokens) == self.max_tokens:
                    break
            # the matcher must read these tokens before any of them are dropped from a full context
            guide.follow(sequence.tokens)
        return events, finish

    def on_context_shift(self, sequence: Sequence) -> None:
        """Report the dropped tokens to the chain. The state of the grammar still includes them."""
        if self.guide:
            self.guide.on_context_shift(
                sequence.overflow_stats.tokens - self.n_dropped, sequence.n_prompt
            )
        self.n_dropped = sequence.overflow_stats.tokens

    def _take(
        self, sequence: Sequence, token: int, constraint: float
    ) -> tuple[Event, Finish | None]:
        """Append a forced token, which needs no draw. Stop strings and the token limit apply as
        usual.
        """
        sequence.tokens.append(token)
        text = self.decoder.feed(self.vocabulary.piece(token))
        event = Event(
            sequence.id,
            sequence.record_token(token, text, 0, 0, None, constraint=constraint, forced=True),
            text,
        )
        if self.decoder.is_stopped:
            return event, "stop"
        return event, "length" if len(sequence.times) == sequence.request.max_tokens else None


STRATEGIES = (GuidedStrategy,)
