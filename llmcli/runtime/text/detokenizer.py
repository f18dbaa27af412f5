"""Turn the bytes of tokens into text while an answer is generated. Text that cannot be shown yet is
held back: an incomplete UTF-8 character, or the possible start of a stop string.
"""

import codecs
from typing import AnyStr


class Detokenizer:
    """Decodes the bytes of one answer, and ends the text before the first stop string, or at a line
    that is indented too little.
    """

    def __init__(self, stops: tuple[str, ...] = (), min_indent: int = 0) -> None:
        """`stops`: the stop strings. `min_indent`: the smallest number of spaces and tabs at the
        beginning of a line after the first one; 0 allows every line.
        """
        self.stops = tuple(stop for stop in stops if stop)
        self.min_indent = min_indent
        self.is_stopped = False  # whether a stop string has appeared
        self.is_outdented = False  # whether a line was indented too little
        self._indent = min_indent  # of the last line; no line end has appeared yet
        self._is_line_start = False  # whether the last line has only spaces and tabs so far
        self._incomplete_bytes = b""  # the first bytes of an incomplete character
        self._held_text = ""  # text that may be the start of a stop string

    def feed(self, piece: bytes) -> str:
        """Add the bytes of the next token. Return the text that can now be shown; it may be empty.
        Once a stop string has appeared, it is always empty.
        """
        if (
            not self._incomplete_bytes and piece.isascii()
        ):  # most pieces are ASCII, and this path is faster
            text = piece.decode()
        else:
            raw = self._incomplete_bytes + piece
            text, n_decoded = codecs.utf_8_decode(raw, "replace")
            self._incomplete_bytes = raw[n_decoded:]
        if self.min_indent:
            text = self._cut_outdented(text)
        return self._release(text) if self.stops else text

    def _cut_outdented(self, text: str) -> str:
        """Return the text before the first letter of a line that is indented too little."""
        if self.is_outdented:
            return ""
        for position, letter in enumerate(text):
            if self._is_line_start:
                if letter in " \t":
                    self._indent += 1
                    continue
                if self._indent < self.min_indent:
                    self.is_outdented = True
                    return text[:position]
                self._is_line_start = False
            if letter == "\n":
                self._indent, self._is_line_start = 0, True
        return text

    def finish(self) -> str:
        """Return the text that was held back. Called at the end of the answer. An incomplete
        character becomes U+FFFD.
        """
        text = "" if self.is_outdented else self._incomplete_bytes.decode("utf-8", "replace")
        text = self._release(text)
        self._incomplete_bytes = b""
        if not self.is_stopped:
            text, self._held_text = text + self._held_text, ""
        return text

    def _release(self, text: str) -> str:
        """Add decoded text. Return the text before the first stop string, or before a possible
        start of one, which is held back.
        """
        if self.is_stopped:
            return ""
        self._held_text += text
        positions = (self._held_text.find(stop) for stop in self.stops)
        stop_start = min((position for position in positions if position >= 0), default=-1)
        if stop_start >= 0:
            self.is_stopped = True
            released, self._held_text = self._held_text[:stop_start], ""
        else:
            n_held = max((overlap_length(self._held_text, stop) for stop in self.stops), default=0)
            released = self._held_text[: len(self._held_text) - n_held]
            self._held_text = self._held_text[len(released) :]
        return released


def overlap_length(text: AnyStr, word: AnyStr) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `word` but not the
    whole word. Example: 2 for the text "a <t" and the word "<think>".
    """
    return next(
        (
            length
            for length in range(min(len(text), len(word) - 1), 0, -1)
            if text.endswith(word[:length])
        ),
        0,
    )
