"""Events -> the terminal: text as it comes, control characters shown and never obeyed.

Plain writes, because they happen once a token (2 µs; a console library takes 50 times that). It
knows nothing of models and conversations.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.chat.display.styles import DIM, PLAIN, WIDTH, bar, one_line
from llmcli.runtime.text.reasoning import Tags
from llmcli.types import Event, TokenTime
from llmcli.ui import UI, put, visible

if TYPE_CHECKING:  # it writes with what is here
    from llmcli.chat.display.answer_formatter import Paint


class Stream:
    """One answer on stdout. `silent` shows nothing (under --json), `paint` None shows the text as
    it is.
    """

    def __init__(self, silent: bool = False, paint: "Paint | None" = None) -> None:
        self.silent = silent
        self._paint, self._painting = paint, False
        self._open_line = False

    def begin(self, opened: Tags | None) -> None:
        """An answer begins whose prompt has opened these thinking tags."""
        if self._paint and not self.silent:
            self._paint.begin(opened)
            self._painting = True

    def show(self, event: Event) -> None:
        """Write what became visible with this event."""
        if self._painting and self._paint:
            self._write(self._paint.feed(event.text))
            self._painting = not self._paint.over
        elif event.text and not self.silent:
            self._open_line = False  # if this fails there is no line to end
            put(sys.stdout, visible(event.text))
            self._open_line = not event.text.endswith("\n")

    def _write(self, text: str) -> None:
        if text:
            self._open_line = False
            put(sys.stdout, text)
            self._open_line = not text.endswith("\n")

    def heading(self, line: str) -> None:
        """A line of its own before what follows."""
        if not self.silent:
            put(sys.stdout, f"{line}\n")

    def close(self) -> None:
        """End the line, so that what follows begins a new one."""
        if self._painting and self._paint:
            self._painting = False
            self._write(self._paint.finish())
        if self._open_line:
            self._open_line = False
            put(sys.stdout, "\n")


def aside(ui: UI, line: str) -> None:
    """One line on stderr, dimmed where a person watches in colour."""
    if ui.color and sys.stderr.isatty():
        put(sys.stderr, f"{DIM}{visible(line)}{PLAIN}\n")
    else:
        ui.note(line)


def histogram(values: Sequence[float], most: int = 8) -> list[tuple[str, int]]:
    """(from-to, how many) of `values`, at most `most` equal steps and one for what is far beyond;
    steps are round.

    The steps end at the 95th percentile, so that one slow token does not press all others into a
    single step.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-(-len(ordered) * 95 // 100) - 1]
    step = next(
        size * 10.0**power
        for power in range(-3, 9)
        for size in (1, 2, 5)
        if math.floor(high / (size * 10.0**power)) - math.floor(low / (size * 10.0**power)) < most
    )
    first, last = math.floor(low / step), math.floor(high / step)
    digits = max(0, -math.floor(math.log10(step)))
    counts = Counter(min(math.floor(value / step), last + 1) for value in ordered)
    rows = [
        (f"{n * step:.{digits}f}-{(n + 1) * step:.{digits}f}", counts[n])
        for n in range(first, last + 1)
    ]
    return (
        [*rows, (f"above {(last + 1) * step:.{digits}f}", counts[last + 1])]
        if counts[last + 1]
        else rows
    )


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a token's time: its name in tables, its mark in bars."""

    name: str
    mark: str
    of: Callable[[TokenTime], float]


SHARES = (
    Share("decode", "█", lambda token: token.decode_ms),
    Share("sample", "▒", lambda token: token.sample_ms),
    Share("grammar", "▓", lambda token: token.constraint_ms),
    Share("rest", "░", lambda token: token.rest_ms),
)


def shares(tokens: Sequence[TokenTime]) -> list[Share]:
    """The parts that these tokens' times have; a grammar's only where there was one."""
    return [share for share in SHARES if share.name != "grammar" or any(map(share.of, tokens))]


def token_rows(tokens: Sequence[TokenTime]) -> list[tuple[str, ...]]:
    """Rows of the /timing table: number, text, ms, each of `shares`, bar.

    Bars are scaled to the slowest token after the first, whose gap holds the whole prompt.
    """
    slowest = max((token.ms for token in tokens[1:]), default=tokens[0].ms if tokens else 1.0)
    parts = shares(tokens)
    return [
        (
            str(number),
            one_line(token.text),
            f"{token.ms:.2f}",
            *(f"{part.of(token):.2f}" for part in parts),
            bar([(part.mark, part.of(token)) for part in parts], slowest)
            if token.ms <= slowest
            else "█" * WIDTH + "…",
        )
        for number, token in enumerate(tokens, 1)
    ]
