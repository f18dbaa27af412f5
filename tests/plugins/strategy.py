"""A decoding strategy that ends an answer after its first line."""

from collections.abc import Iterator
from typing import ClassVar

from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.strategies.plain import PlainStrategy
from llmcli.types import Event, Finish


class OneLine(PlainStrategy):
    """Samples one token per pass, as plain decoding does. A line break ends the answer."""

    name: ClassVar[str] = "one-line"

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Sample a token from the logits of a pass. Return the new events, and the reason why the
        answer ends, or None.
        """
        events, finish = super().accept(sequence, rows, spent)
        if finish is None and any("\n" in event.text for event in events):
            finish = "stop"
        return events, finish


STRATEGIES = (OneLine,)
