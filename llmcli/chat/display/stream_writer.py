"""Writes an answer to the terminal as it is generated, with control characters made visible.

Plain writes are used because there is one for each token: a console library takes 50 times as long.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.chat.display.styles import DIM, PLAIN, WIDTH, bar, one_line
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Event, TokenTime
from llmcli.ui import UI, put, visible

if TYPE_CHECKING:  # only a type: the formatter imports this module
    from llmcli.chat.display.answer_formatter import Paint


class Stream:
    """Writes one answer to stdout. `silent` writes nothing (--json); without `paint`, text is not
    formatted.
    """

    def __init__(self, silent: bool = False, paint: "Paint | None" = None) -> None:
        self.silent = silent
        self._paint, self._painting = paint, False
        self._open_line = False

    def begin(self, opened: ThinkingTags | None) -> None:
        """Begin an answer; `opened` are the thinking tags that its prompt opened."""
        if self._paint and not self.silent:
            self._paint.begin(opened)
            self._painting = True

    def show(self, event: Event) -> None:
        """Write the text that became visible with this event."""
        if self._painting and self._paint:
            self._write(self._paint.feed(event.text))
            self._painting = not self._paint.over
        elif event.text and not self.silent:
            self._open_line = False  # if the write fails, there is no line to end
            put(sys.stdout, visible(event.text))
            self._open_line = not event.text.endswith("\n")

    def _write(self, text: str) -> None:
        if text:
            self._open_line = False
            put(sys.stdout, text)
            self._open_line = not text.endswith("\n")

    def heading(self, line: str) -> None:
        """Write a separate line before the answer."""
        if not self.silent:
            put(sys.stdout, f"{line}\n")

    def close(self) -> None:
        """End the current line."""
        if self._painting and self._paint:
            self._painting = False
            self._write(self._paint.finish())
        if self._open_line:
            self._open_line = False
            put(sys.stdout, "\n")


def aside(ui: UI, line: str) -> None:
    """Print one line on stderr, dimmed on a color terminal."""
    if ui.color and sys.stderr.isatty():
        put(sys.stderr, f"{DIM}{visible(line)}{PLAIN}\n")
    else:
        ui.note(line)


def histogram(values: Sequence[float], most: int = 8) -> list[tuple[str, int]]:
    """Count `values` in at most `most` equal bins of round size; return (label, count) pairs.

    The bins end at the 95th percentile, and one more bin counts larger values, so that one slow
    token does not squeeze all others into a single bin.
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
    """Return the parts that these tokens have; the grammar's only if there was one."""
    return [share for share in SHARES if share.name != "grammar" or any(map(share.of, tokens))]


def token_rows(tokens: Sequence[TokenTime]) -> list[tuple[str, ...]]:
    """Return the rows of the /timing table: number, text, ms, one column for each part, bar.

    Bars are scaled to the slowest token after the first, whose time includes the whole prompt.
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
