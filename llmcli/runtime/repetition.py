"""Whether an answer only repeats itself: small models sampled warm, and any model decoded greedily,
fall into loops that end with the context, minutes later.

Exact loops are rare in sampled text, where a word differs here and there; what gives them all away
is that they compress (Whisper's decoder uses the same sign). Prose compresses 2 times, code 3, a
list of settings 4.
"""

import zlib

WINDOW = 2048  # bytes at the end of the text that are looked at
RATIO = 10
EVERY = 64  # tokens between two looks


def repeats(pieces: list[str]) -> bool:
    """Whether the last bytes of the text in `pieces` say the same over and over; False while it is
    shorter.
    """
    tail = "".join(pieces[-WINDOW:]).encode("utf-8", "replace")[-WINDOW:]
    return len(tail) == WINDOW and len(zlib.compress(tail)) * RATIO <= WINDOW
