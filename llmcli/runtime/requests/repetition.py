"""Detects answers that only repeat themselves. Models that decode greedily, and small models in
general, fall into loops that fill the context.

Sampled loops vary by a word in some places, but all loops compress well, which Whisper's decoder
also uses as a sign. Prose compresses by a factor of 2, code by 3, lists of settings by 4.
"""

import zlib

WINDOW_BYTES = 2048  # bytes checked at the end of the text
MIN_COMPRESSION_RATIO = 10
TOKENS_BETWEEN_CHECKS = 64  # tokens generated between two checks


def is_repetitive(pieces: list[str]) -> bool:
    """Return whether the end of the text in `pieces` repeats itself. It is False while the text is
    shorter than WINDOW_BYTES.
    """
    tail = "".join(pieces[-WINDOW_BYTES:]).encode("utf-8", "replace")[-WINDOW_BYTES:]
    return (
        len(tail) == WINDOW_BYTES
        and len(zlib.compress(tail)) * MIN_COMPRESSION_RATIO <= WINDOW_BYTES
    )
