"""Detects an answer that only repeats itself: models that decode greedily, and small ones in
general, fall into loops that fill the context.

Sampled loops vary by a word here and there, but all of them compress well, the sign that Whisper's
decoder uses, too. Prose compresses by a factor of 2, code 3, lists of settings 4.
"""

import zlib

WINDOW = 2048  # bytes checked at the end of the text
RATIO = 10
EVERY = 64  # tokens between two checks


def repeats(pieces: list[str]) -> bool:
    """Return whether the end of the text in `pieces` repeats itself; False while it is shorter than
    the window.
    """
    tail = "".join(pieces[-WINDOW:]).encode("utf-8", "replace")[-WINDOW:]
    return len(tail) == WINDOW and len(zlib.compress(tail)) * RATIO <= WINDOW
