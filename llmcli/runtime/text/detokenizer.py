"""Turns the bytes of tokens into text for display. Incomplete characters and possible stop strings
are held back.
"""

import codecs


class Detokenizer:
    """Decodes the bytes of one answer. `is_stopped`: True after a stop string has appeared."""

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.is_stopped = False
        self._half = b""  # the first bytes of an incomplete character
        self._held = ""

    def feed(self, piece: bytes) -> str:
        """Return the text that can be shown after this piece. It is empty while the end of the text
        may be an incomplete character or the start of a stop string.
        """
        if not self._half and piece.isascii():  # most pieces are ASCII, and this path is faster
            text = piece.decode()
        else:
            raw = self._half + piece
            text, used = codecs.utf_8_decode(raw, "replace")
            self._half = raw[used:]
        return self._release(text) if self.stops else text

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer. An incomplete character
        becomes U+FFFD.
        """
        text = self._release(self._half.decode("utf-8", "replace"))
        self._half = b""
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        cut = min(
            (at for at in (self._held.find(stop) for stop in self.stops) if at >= 0), default=-1
        )
        if cut >= 0:
            self.is_stopped = True
            shown, self._held = self._held[:cut], ""
        else:
            keep = max((overlap_length(self._held, stop) for stop in self.stops), default=0)
            shown = self._held[: len(self._held) - keep]
            self._held = self._held[len(shown) :]
        return shown


def overlap_length(text: str, word: str) -> int:
    """Return the length of the longest suffix of `text` with which `word` begins. A suffix that is
    the whole word does not count.
    """
    return next(
        (
            length
            for length in range(min(len(text), len(word) - 1), 0, -1)
            if text.endswith(word[:length])
        ),
        0,
    )
