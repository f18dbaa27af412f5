"""Detects answers that only repeat themselves. Models that decode greedily, and small models in
general, can fall into loops that fill the context.

Text is taken as a loop when it compresses very well, a sign that Whisper's decoder also uses. This
also finds sampled loops, in which single words vary. Prose, code and lists compress far less.
"""

import zlib

WINDOW_BYTES = 2048  # bytes checked at the end of the text
MIN_COMPRESSION_RATIO = 10
TOKENS_BETWEEN_CHECKS = 64  # tokens generated between two checks


def is_repetitive(pieces: list[str]) -> bool:
    """Return whether the end of a text only repeats itself. `pieces`: the text of each token.
    Return False while the text is shorter than WINDOW_BYTES.
    """
    tail = "".join(pieces[-WINDOW_BYTES:]).encode("utf-8", "replace")[-WINDOW_BYTES:]
    return (
        len(tail) == WINDOW_BYTES
        and len(zlib.compress(tail)) * MIN_COMPRESSION_RATIO <= WINDOW_BYTES
    )
