"""Detects answers that only repeat themselves. Models that decode greedily, and small models in
general, can fall into loops that fill the context.

Text is taken as a loop only if its end is one block of text that is repeated exactly. Tables, lists
of numbered items and code compress well, too, but no two of their rows are equal.
"""

MIN_LOOP_BYTES = 2048  # a shorter loop may be meant
MIN_REPEATS = 4  # how often the block must occur
MAX_BLOCK_BYTES = 4096  # longest block that is looked for
WINDOW_BYTES = MIN_REPEATS * MAX_BLOCK_BYTES  # bytes checked at the end of the text
KEY_BYTES = 32  # bytes at the end of the text whose earlier occurrences tell the possible periods
MAX_TRIES = 64  # possible periods that are compared; more are only in texts that are no loop
TOKENS_BETWEEN_CHECKS = 64  # tokens generated between two checks


def is_repetitive(pieces: list[str]) -> bool:
    """Return whether a text ends with at least MIN_LOOP_BYTES in which a block of at most
    MAX_BLOCK_BYTES is repeated at least MIN_REPEATS times. The last repetition may be incomplete.
    `pieces`: the text of each token.
    """
    tail = "".join(pieces[-WINDOW_BYTES:]).encode("utf-8", "replace")[-WINDOW_BYTES:]
    if len(tail) < MIN_LOOP_BYTES:
        return False
    key, end = tail[-KEY_BYTES:], len(tail) - 1
    for _ in range(MAX_TRIES):
        start = tail.rfind(key, 0, end)
        period = len(tail) - KEY_BYTES - start
        if start < 0 or period > MAX_BLOCK_BYTES:
            return False
        size = max(MIN_LOOP_BYTES, MIN_REPEATS * period)
        if size <= len(tail) and tail[-size + period :] == tail[-size:-period]:
            return True
        end = start + KEY_BYTES - 1
    return False
