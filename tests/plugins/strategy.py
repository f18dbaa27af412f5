"""Plain decoding that ends an answer after its first line."""

from collections.abc import Iterator
from typing import ClassVar

from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.strategies.plain import PlainStrategy
from llmcli.types import Event, Finish


class OneLine(PlainStrategy):
    """Draws a token a pass; a line break ends the answer."""

    name: ClassVar[str] = "one-line"

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Read the row of a pass; return the new events, and why the answer ends."""
        events, finish = super().accept(sequence, rows, spent)
        if finish is None and any("\n" in event.text for event in events):
            finish = "stop"
        return events, finish


STRATEGIES = (OneLine,)
