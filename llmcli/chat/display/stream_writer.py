"""Writes an answer to the terminal as it is generated, with control characters made visible.

Plain writes are used because there is one for each token: a console library takes 50 times as long.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.chat.display.styles import BAR_COLUMNS, DIM, RESET, draw_bar, escape_line
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Event, TokenTime
from llmcli.ui import UI, escape_controls, write_now

if TYPE_CHECKING:  # only a type: the formatter imports this module
    from llmcli.chat.display.answer_formatter import AnswerFormatter


class StreamWriter:
    """Writes one answer to stdout.

    With `silent` (--json), nothing is written. Without `formatter`, text is not formatted.
    """

    def __init__(self, silent: bool = False, formatter: "AnswerFormatter | None" = None) -> None:
        self.silent = silent
        self._formatter, self._is_formatting = formatter, False
        self._open_line = False

    def begin_answer(self, opened: ThinkingTags | None) -> None:
        """Begin an answer; `opened` are the thinking tags that its prompt opened."""
        if self._formatter and not self.silent:
            self._formatter.begin(opened)
            self._is_formatting = True

    def write_event(self, event: Event) -> None:
        """Write the text that became visible with this event."""
        if self._is_formatting and self._formatter:
            self._write(self._formatter.feed(event.text))
            self._is_formatting = not self._formatter.is_passthrough
        elif event.text and not self.silent:
            self._open_line = False  # if the write fails, there is no line to end
            write_now(sys.stdout, escape_controls(event.text))
            self._open_line = not event.text.endswith("\n")

    def _write(self, text: str) -> None:
        if text:
            self._open_line = False
            write_now(sys.stdout, text)
            self._open_line = not text.endswith("\n")

    def write_heading(self, line: str) -> None:
        """Write a separate line before the answer."""
        if not self.silent:
            write_now(sys.stdout, f"{line}\n")

    def close(self) -> None:
        """End the current line."""
        if self._is_formatting and self._formatter:
            self._is_formatting = False
            self._write(self._formatter.finish())
        if self._open_line:
            self._open_line = False
            write_now(sys.stdout, "\n")


def print_dimmed(ui: UI, line: str) -> None:
    """Print one line on stderr, dimmed on a color terminal."""
    if ui.color and sys.stderr.isatty():
        write_now(sys.stderr, f"{DIM}{escape_controls(line)}{RESET}\n")
    else:
        ui.note(line)


def build_histogram(values: Sequence[float], max_bins: int = 8) -> list[tuple[str, int]]:
    """Count `values` in at most `max_bins` equal bins of round size; return (label, count) pairs.

    The bins end at the 95th percentile, and one more bin counts larger values, so that one slow
    token does not squeeze all others into a single bin.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-(-len(ordered) * 95 // 100) - 1]
    step = next(
        size * 10.0**power
        for power in range(-3, 9)
        for size in (1, 2, 5)
        if math.floor(high / (size * 10.0**power)) - math.floor(low / (size * 10.0**power))
        < max_bins
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
class TimeShare:
    """A part of a token's time: its name in tables, its mark in bars, its milliseconds."""

    name: str
    mark: str
    milliseconds: Callable[[TokenTime], float]


TIME_SHARES = (
    TimeShare("decode", "█", lambda token: token.decode_ms),
    TimeShare("sample", "▒", lambda token: token.sample_ms),
    TimeShare("grammar", "▓", lambda token: token.constraint_ms),
    TimeShare("rest", "░", lambda token: token.other_ms),
)


def used_shares(tokens: Sequence[TokenTime]) -> list[TimeShare]:
    """Return the parts of the time to show for `tokens`; the grammar's only if it took any time."""
    return [
        share
        for share in TIME_SHARES
        if share.name != "grammar" or any(map(share.milliseconds, tokens))
    ]


def timing_rows(tokens: Sequence[TokenTime]) -> list[tuple[str, ...]]:
    """Return the rows of the /timing table: number, text, ms, one column for each part, bar.

    Bars are scaled to the slowest token after the first, whose time includes the whole prompt.
    """
    slowest = max((token.ms for token in tokens[1:]), default=tokens[0].ms if tokens else 1.0)
    parts = used_shares(tokens)
    return [
        (
            str(number),
            escape_line(token.text),
            f"{token.ms:.2f}",
            *(f"{part.milliseconds(token):.2f}" for part in parts),
            draw_bar([(part.mark, part.milliseconds(token)) for part in parts], slowest)
            if token.ms <= slowest
            else "█" * BAR_COLUMNS + "…",
        )
        for number, token in enumerate(tokens, 1)
    ]
