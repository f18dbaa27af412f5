"""A terminal emulator that turns text and escape sequences into the lines that a user would see.

It supports the sequences that prompt_toolkit and line-based programs send: cursor moves, erasing
and wrapping. Colors are ignored.
"""

import re
from collections.abc import Callable

from prompt_toolkit.utils import get_cwidth

PIECE = re.compile(
    r"\x1b\](?P<osc>[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b\[(?P<private>[?>=]?)(?P<numbers>[0-9;]*)[ -/]*(?P<letter>[@-~])"
    r"|\x1b(?P<cursor>[78])|\x1b[()#][0-9A-Za-z]|\x1b[=>A-Za-z]"
    r"|(?P<text>[^\x00-\x1f\x7f]+)|(?P<control>[\x00-\x1a\x1c-\x1f\x7f])",
    re.DOTALL,
)


class TerminalScreen:
    """A screen of `width` columns and `height` rows, with the lines that have scrolled off its top.

    It is a file object to which the program's output is written. `reply` is called with the
    terminal's answer when the program requests the cursor position. `osc_sequences`: operating
    system commands (such as for the clipboard), which are not shown.
    """

    def __init__(
        self, width: int, height: int, reply: Callable[[str], object] = lambda answer: None
    ) -> None:
        self.width, self.height, self.reply = width, height, reply
        self.lines: list[list[str]] = [[]]
        self.row = self.column = self.top = 0  # `top` is the index of the first visible line
        self.wraps, self._incomplete = True, ""
        self._saved_cursor = 0, 0  # line and column that ESC 7 has stored
        self.osc_sequences: list[str] = []

    def write(self, text: str) -> None:
        """Write text. An incomplete escape sequence at its end waits for the next call."""
        text = self._incomplete + text
        escape = text.rfind("\x1b")
        is_complete = escape < 0 or PIECE.match(text, escape) is not None
        self._incomplete = "" if is_complete else text[escape:]
        self.feed(text if is_complete else text[:escape])

    def flush(self) -> None:
        """Do nothing. A file object needs this method."""

    def feed(self, text: str) -> None:
        """Write text without incomplete sequences, and execute its escape sequences."""
        for piece in PIECE.finditer(text):
            if piece["text"]:
                for character in piece["text"]:
                    self._put(character)
            elif piece["control"]:
                self._control(piece["control"])
            elif piece["osc"] is not None:
                self.osc_sequences.append(piece["osc"])
            elif piece["cursor"] == "7":
                self._saved_cursor = self.row, self.column
            elif piece["cursor"] == "8":
                self.row, self.column = self._saved_cursor
            elif piece["letter"]:
                numbers = [int(number) for number in piece["numbers"].split(";") if number]
                self._sequence(piece["private"], piece["letter"], numbers)

    def text(self) -> str:
        """Return all lines, including the scrolled ones, without trailing blanks."""
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip() + "\n"

    def _put(self, character: str) -> None:
        width = max(0, get_cwidth(character))
        if self.column + width > self.width:
            if self.wraps:
                self._down(1)
                self.column = 0
            else:
                self.column = self.width - max(1, width)
        line = self._line()
        if not width:  # a combining character
            if self.column:
                line[self.column - 1] += character
            return
        line += [" "] * (self.column - len(line))
        line[self.column : self.column + width] = [character, *[""] * (width - 1)]
        self.column += width

    def _control(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character in "\n\x0b\x0c":
            self._down(1)
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\t":
            self.column = min(self.width - 1, self.column // 8 * 8 + 8)

    def _sequence(self, private: str, letter: str, numbers: list[int]) -> None:
        count = max(1, numbers[0]) if numbers else 1
        if private == "?" and letter in "hl":
            if 7 in numbers:
                self.wraps = letter == "h"
        elif letter == "A":
            self.row = max(self.top, self.row - count)
        elif letter == "B":
            self.row = min(self.top + self.height - 1, self.row + count)
            self._line()
        elif letter in "CD":
            self.column = max(
                0, min(self.width - 1, self.column + (count if letter == "C" else -count))
            )
        elif letter == "G":
            self.column = min(self.width, count) - 1
        elif letter in "Hf":
            self.row = self.top + count - 1
            self.column = max(1, numbers[1] if len(numbers) > 1 else 1) - 1
            self._line()
        elif letter == "n" and numbers == [6]:
            self.reply(f"\x1b[{self.row - self.top + 1};{self.column + 1}R")
        elif letter == "J":
            self._erase_below() if (numbers or [0])[0] == 0 else self._erase_all()
        elif letter == "K":
            line = self._line()
            start, end = ((self.column, len(line)), (0, self.column + 1), (0, len(line)))[
                (numbers or [0])[0]
            ]
            line[start:end] = [] if end == len(line) else [" "] * (end - start)

    def _down(self, count: int) -> None:
        self.row += count
        self.top = max(self.top, self.row - self.height + 1)
        self._line()

    def _line(self) -> list[str]:
        while len(self.lines) <= self.row:
            self.lines.append([])
        return self.lines[self.row]

    def _erase_below(self) -> None:
        del self._line()[self.column :]
        del self.lines[self.row + 1 :]

    def _erase_all(self) -> None:
        del self.lines[self.top :]
        self._line()
