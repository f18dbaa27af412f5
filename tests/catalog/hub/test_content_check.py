"""ContentCheck: whatever the order of the reads, wrong bytes are found and right ones are accepted."""

import hashlib
import random
from itertools import pairwise

import numpy as np
import pytest

from llmcli.catalog.hub import content_check
from llmcli.catalog.hub.content_check import BLOCK_BYTES, ContentCheck, WaitingBytes
from quant.errors import DamagedSourceError

DATA = random.Random(1).randbytes(40 * BLOCK_BYTES + 100)
SHA256 = hashlib.sha256(DATA).hexdigest()


def add(check: ContentCheck, first: int, last: int, data: bytes = DATA) -> None:
    """Add the blocks that contain the bytes first .. last."""
    start, end = check.aligned(first, last)
    check.add(start, np.frombuffer(data[start:end], np.uint8))


def finish(check: ContentCheck, data: bytes = DATA) -> None:
    """Read what the check still needs."""
    while span := check.next_reread(is_last=True):
        add(check, *span, data)


def random_reads(seed: int) -> list[tuple[int, int]]:
    """Return reads of all blocks in a random order, some of them twice or overlapping."""
    rng = random.Random(seed)
    bounds = sorted({0, len(DATA), *(rng.randrange(len(DATA)) for _ in range(12))})
    reads = list(pairwise(bounds))
    reads += [tuple(sorted(rng.sample(range(len(DATA)), 2))) for _ in range(4)]  # type: ignore[misc]
    rng.shuffle(reads)
    return reads


@pytest.mark.parametrize("limit", [0, 5 * BLOCK_BYTES, len(DATA)])
@pytest.mark.parametrize("seed", range(20))
def test_reads_in_any_order_are_accepted(seed: int, limit: int) -> None:
    waiting = WaitingBytes(limit)
    check = ContentCheck("file", len(DATA), SHA256, waiting)
    for first, last in random_reads(seed):
        add(check, first, last)
        while span := check.next_reread():
            add(check, *span)
    assert check.is_complete
    assert waiting.used == 0


@pytest.mark.parametrize("limit", [0, 5 * BLOCK_BYTES, len(DATA)])
@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_byte_in_any_single_read_is_found(seed: int, limit: int) -> None:
    reads = random_reads(seed)
    rng = random.Random(seed)
    wrong = rng.randrange(len(reads))
    position = rng.randrange(*reads[wrong])
    flipped = DATA[:position] + bytes([DATA[position] ^ 1]) + DATA[position + 1 :]
    check = ContentCheck("file", len(DATA), SHA256, WaitingBytes(limit))

    def read_all() -> None:
        for number, (first, last) in enumerate(reads):
            add(check, first, last, flipped if number == wrong else DATA)
            while span := check.next_reread():
                add(check, *span)

    with pytest.raises(DamagedSourceError, match="file was changed on its way"):
        read_all()


def test_parts_in_order_are_never_read_again() -> None:
    check = ContentCheck("file", len(DATA), SHA256, WaitingBytes(0))
    for first in range(0, len(DATA), BLOCK_BYTES):
        add(check, first, min(first + BLOCK_BYTES, len(DATA)))
        assert check.next_reread() is None
    assert check.is_complete


def test_parts_that_are_never_read_are_read_at_the_end() -> None:
    check = ContentCheck("file", len(DATA), SHA256, WaitingBytes())
    add(check, 20 * BLOCK_BYTES, len(DATA))
    assert check.next_reread() is None  # another thread may still read the beginning
    assert check.next_reread(is_last=True) == (0, 20 * BLOCK_BYTES)
    finish(check)
    assert check.is_complete


def test_a_near_part_waits_instead_of_a_far_one() -> None:
    check = ContentCheck("file", len(DATA), SHA256, WaitingBytes(2 * BLOCK_BYTES))
    for block in (30, 31, 10):
        add(check, block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
    assert sorted(check._parts) == [10 * BLOCK_BYTES, 30 * BLOCK_BYTES]
    add(check, 0, 30 * BLOCK_BYTES)
    assert check.next_reread() == (31 * BLOCK_BYTES, 32 * BLOCK_BYTES)


def test_a_block_that_differs_the_second_time_raises_an_error() -> None:
    check = ContentCheck("file", len(DATA), SHA256, WaitingBytes())
    add(check, 0, 10)
    with pytest.raises(DamagedSourceError, match="different bytes for the same part"):
        add(check, 0, 10, bytes(len(DATA)))


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_small_files_and_git_blob_ids(size: int) -> None:
    data = DATA[:size]
    git_id = hashlib.sha1(b"blob %d\0" % size + data).hexdigest()
    for digest in (hashlib.sha256(data).hexdigest(), git_id):
        check = ContentCheck("file", size, digest, WaitingBytes())
        finish(check, data)
        assert check.is_complete
    if size:
        with pytest.raises(DamagedSourceError):
            finish(ContentCheck("file", size, git_id, WaitingBytes()), bytes(size))


def test_one_request_for_the_check_alone_has_a_limited_size(monkeypatch) -> None:
    monkeypatch.setattr(content_check, "MAX_REREAD_BYTES", 4 * BLOCK_BYTES)
    check = ContentCheck("file", len(DATA), SHA256, WaitingBytes())
    assert check.next_reread(is_last=True) == (0, 4 * BLOCK_BYTES)
