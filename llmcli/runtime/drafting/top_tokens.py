"""The likeliest tokens of a row of logits."""

import numpy as np
from numpy.typing import NDArray


def top_tokens(logits: NDArray[np.float32], count: int, first: int | None = None) -> list[int]:
    """Return `count` tokens, the likeliest first. Of equally likely ones, the best has the lowest
    id.

    `first`: the token that counts as the best, if it is not the one with the largest logit.

    Shapes: logits `[n_vocab]`.
    """
    best = int(logits.argmax()) if first is None else first
    if count == 1:
        return [best]
    count = min(count, len(logits))
    found = np.argpartition(logits, -count)[-count:]
    found = found[np.argsort(-logits[found], kind="stable")]
    return [best, *(int(token) for token in found if token != best)][:count]
