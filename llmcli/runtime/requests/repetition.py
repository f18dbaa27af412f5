"""Detects an answer that only repeats itself: models that decode greedily, and small ones in
general, fall into loops that fill the context.

Sampled loops vary by a word here and there, but all of them compress well, the sign that Whisper's
decoder uses, too. Prose compresses by a factor of 2, code 3, lists of settings 4.
"""

import zlib

WINDOW_BYTES = 2048  # bytes checked at the end of the text
MIN_COMPRESSION_RATIO = 10
TOKENS_BETWEEN_CHECKS = 64  # tokens between two checks


def is_repetitive(pieces: list[str]) -> bool:
    """Return whether the end of the text in `pieces` repeats itself; False while it is shorter than
    the window.
    """
    tail = "".join(pieces[-WINDOW_BYTES:]).encode("utf-8", "replace")[-WINDOW_BYTES:]
    return (
        len(tail) == WINDOW_BYTES
        and len(zlib.compress(tail)) * MIN_COMPRESSION_RATIO <= WINDOW_BYTES
    )
