"""Writes an answer to the terminal while it is generated, with visible symbols in place of control
characters. Also formats the tables of /timing.

The writer calls write() directly, because a console library would be too slow for every token.
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
from llmcli.ui import UI, escape_controls, wrap_line, write_now

if TYPE_CHECKING:
    from llmcli.chat.display.answer_formatter import AnswerFormatter


class StreamWriter:
    """Writes answers to stdout. `silent`: write nothing, as for --json. `formatter`: formats
    thinking and Markdown; None writes the text as it is.
    """

    def __init__(self, silent: bool = False, formatter: "AnswerFormatter | None" = None) -> None:
        self.silent = silent
        self._formatter, self._is_formatting = formatter, False
        self._is_line_open = False

    def begin_answer(self, opened: ThinkingTags | None) -> None:
        """Start an answer. `opened`: the thinking tags that are open at the end of its prompt, or
        None.
        """
        if self._formatter and not self.silent:
            self._formatter.begin(opened)
            self._is_formatting = True

    def write_event(self, event: Event) -> None:
        """Write the text of an event of the engine, which is one token or several."""
        if self._is_formatting and self._formatter:
            self._write(self._formatter.feed(event.text))
            self._is_formatting = not self._formatter.is_passthrough
        elif event.text and not self.silent:
            self._is_line_open = False  # if the write fails, there is no line to end
            write_now(sys.stdout, escape_controls(event.text))
            self._is_line_open = not event.text.endswith("\n")

    def _write(self, text: str) -> None:
        """Write formatted text, and note whether it ends in the middle of a line."""
        if text:
            self._is_line_open = False
            write_now(sys.stdout, text)
            self._is_line_open = not text.endswith("\n")

    def write_heading(self, line: str) -> None:
        """Write a line above an answer."""
        if not self.silent:
            write_now(sys.stdout, f"{line}\n")

    def close(self) -> None:
        """End the answer. Write the text that the formatter has kept back, and a line break."""
        if self._is_formatting and self._formatter:
            self._is_formatting = False
            self._write(self._formatter.finish())
        if self._is_line_open:
            self._is_line_open = False
            write_now(sys.stdout, "\n")


def print_dimmed(ui: UI, line: str) -> None:
    """Print a line on stderr, wrapped between words if stderr is a terminal, and dimmed if it has
    colors.
    """
    if ui.color and sys.stderr.isatty():
        text = wrap_line(escape_controls(line), sys.stderr)
        write_now(sys.stderr, f"{DIM}{text}{RESET}\n")
    else:
        ui.note(line)


def build_histogram(values: Sequence[float], max_bins: int = 8) -> list[tuple[str, int]]:
    """Return a histogram of the values: pairs of a label such as "8.0-8.5" and a count. At most
    `max_bins` bins of the same round width reach up to the 95th percentile.

    One more bin counts all larger values. Otherwise a single slow token would make the bins so wide
    that all others fall into one bin.
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
    """An activity that takes a part of each token's time, such as sampling. `mark`: its character
    in bars. `milliseconds`: function that returns the time it took for a token.
    """

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
    """Return the activities to show in a table of these tokens: all of TIME_SHARES, but the grammar
    only if it took any time. Empty if only whole times are known, as with a server.
    """
    if not any(token.decode_ms for token in tokens):
        return []
    return [
        share
        for share in TIME_SHARES
        if share.name != "grammar" or any(map(share.milliseconds, tokens))
    ]


def timing_rows(tokens: Sequence[TokenTime]) -> list[tuple[str, ...]]:
    """Return the rows of the /timing table: number, text, milliseconds, milliseconds of each
    activity, and a bar.

    The longest bar is that of the slowest token after the first. The first token's time includes
    the prompt, and its bar is cut off.
    """
    slowest = max((token.ms for token in tokens[1:]), default=tokens[0].ms if tokens else 1.0)
    parts = used_shares(tokens)
    return [
        (
            str(number),
            escape_line(token.text),
            f"{token.ms:.2f}",
            *(f"{part.milliseconds(token):.2f}" for part in parts),
            draw_bar(
                [(part.mark, part.milliseconds(token)) for part in parts] or [("█", token.ms)],
                slowest,
            )
            if token.ms <= slowest
            else "█" * BAR_COLUMNS + "…",
        )
        for number, token in enumerate(tokens, 1)
    ]
