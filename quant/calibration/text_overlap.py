"""How much of one text is in another, estimated from small samples of both.

A sample has the smallest hashes of the text's windows of WINDOW_BYTES bytes, at every position
(bottom-k sketch: Broder, On the resemblance and containment of documents, 1997). Whether a window
is in the sample depends on its bytes alone, so two samples contain the same windows of a passage
that both texts have. Case and white space are ignored.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WINDOW_BYTES = 48  # about eight words: shorter phrases occur in unrelated texts
SAMPLE_SIZE = 1 << 14  # hashes of a sample; the standard error of a share is below 0.004
PART_BYTES = 1 << 20  # that are hashed at a time
MULTIPLIER = 0x9E3779B97F4A7C15  # of the polynomial hash, odd
INVERSE = pow(MULTIPLIER, -1, 1 << 64)


def sample_windows(texts: Iterable[str]) -> tuple[int, ...]:
    """Return the sample of some texts together: distinct hashes below 2^32 in ascending order."""
    import numpy as np

    smallest = np.empty(0, np.uint64)
    for text in texts:
        data = np.frombuffer(" ".join(text.casefold().split()).encode(), np.uint8)
        for start in range(0, max(0, len(data) - WINDOW_BYTES + 1), PART_BYTES):
            hashes = _hash_windows(data[start : start + PART_BYTES + WINDOW_BYTES - 1])
            if len(smallest) == SAMPLE_SIZE:
                hashes = hashes[hashes < smallest[-1]]
            smallest = np.unique(np.concatenate([smallest, hashes]))[:SAMPLE_SIZE]
    return tuple(map(int, smallest))


def merge_samples(samples: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sample of several texts together, from their samples."""
    return tuple(sorted({hash for sample in samples for hash in sample})[:SAMPLE_SIZE])


def overlap(sample: Sequence[int], other: Sequence[int]) -> float | None:
    """Return which share of a text's windows another text has, too. `sample` is of the text. None
    if a sample is empty, as of a text that is too short.
    """
    if not sample or not other:
        return None
    # above its greatest hash, a full sample does not say what its text has
    limit = other[-1] if len(other) == SAMPLE_SIZE else sample[-1]
    known = [hash for hash in sample if hash <= limit]
    return len(set(known) & set(other)) / len(known) if known else 0.0


def _hash_windows(data: "NDArray[np.uint8]") -> "NDArray[np.uint64]":
    """Return the hash of each window of `data`, below 2^32.

    The sum of byte k times INVERSE^k over a window that begins at `at` is a difference of two
    running sums over all bytes, times MULTIPLIER^at (all modulo 2^64).
    """
    import numpy as np

    count = len(data) - WINDOW_BYTES + 1
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(data * _powers(INVERSE, len(data)), out=sums[1:])
    hashes = (sums[WINDOW_BYTES:] - sums[:count]) * _powers(MULTIPLIER, count)
    hashes ^= hashes >> np.uint64(29)  # the upper bits of a sum of products are the best mixed
    hashes *= np.uint64(MULTIPLIER)
    result: NDArray[np.uint64] = hashes >> np.uint64(32)
    return result


def _powers(base: int, count: int) -> "NDArray[np.uint64]":
    """Return the powers of `base` with the exponents 0 to count - 1, modulo 2^64."""
    import numpy as np

    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    powers: NDArray[np.uint64] = np.multiply.accumulate(factors)
    return powers
