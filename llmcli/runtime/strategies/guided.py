"""One token after the other inside a grammar; text that must come is taken without being drawn
(jump-forward).

Forced tokens stand in the sequence like others, so that penalties see them, and enter the cache
together with the next pass: a span of n costs one pass of n rows with logits for the last.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from llmcli.runtime.constraint.chain import GuidedChain
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.chain import Row
from llmcli.runtime.sequence import Sequence
from llmcli.runtime.strategies.base import Means
from llmcli.runtime.strategies.plain import Plain
from llmcli.types import Event, Finish


class Guided(Plain):
    """Plain decoding, which it is without a grammar; an answer that nothing may follow ends without
    another pass.
    """

    name: ClassVar[str] = "guided"

    def __init__(self, request: Request, seed: int, means: Means) -> None:
        super().__init__(request, seed, means)
        self.guide = self.chain if isinstance(self.chain, GuidedChain) else None
        self.jump = request.grammar.constraint.jump if request.grammar else "off"
        self.room = means.ledger.size + 1  # the last token is never computed
        self.gone = 0  # tokens that have left the sequence

    def accept(
        self, sequence: Sequence, rows: Iterator[Row], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Draw from the one row, then take what must follow."""
        events, finish = super().accept(sequence, rows, spent)
        guide = self.guide
        if guide is None:
            return events, finish
        if events and (drawn := events[0].token):
            total, inside = guide.spent()
            drawn = replace(
                drawn, sample_ms=drawn.sample_ms - inside * 1e3, constraint_ms=total * 1e3
            )
            sequence.times[-1] = drawn
            events[0] = replace(events[0], token=drawn)
        while events and finish is None and len(sequence.tokens) < self.room:
            forced, complete = guide.ahead(sequence.tokens, self.jump)
            if complete:
                return events, "stop"
            if not forced:
                break
            for token in forced:
                event, finish = self._take(sequence, token, guide.spent()[0])
                events.append(event)
                if finish or len(sequence.tokens) == self.room:
                    break
            guide.follow(sequence.tokens)  # before some of them leave a full context
        return events, finish

    def shortened(self, sequence: Sequence) -> None:
        """What the grammar has read it has read, though it may be gone."""
        if self.guide:
            self.guide.shortened(sequence.left.tokens - self.gone, sequence.prompt)
        self.gone = sequence.left.tokens

    def _take(
        self, sequence: Sequence, token: int, constraint: float
    ) -> tuple[Event, Finish | None]:
        """One token without a draw; stop strings and the limit hold for it as for others."""
        sequence.tokens.append(token)
        text = self.decoder.feed(self.vocabulary.piece(token))
        event = Event(
            sequence.id,
            sequence.time(token, text, 0, 0, None, constraint=constraint, forced=True),
            text,
        )
        if self.decoder.stopped:
            return event, "stop"
        return event, "length" if len(sequence.times) == sequence.request.max_tokens else None


STRATEGIES = (Guided,)
