"""scripts/quality/runs.py: measured programs, and stored logits of the full-precision model."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripts.quality import runs


def test_kept_logits_lie_beside_those_of_the_file_also_where_its_last_block_is_shorter() -> None:
    logits = np.arange(2 * 7 * 3, dtype=np.float32).reshape(2, 7, 3)

    def blocks(ids: Any) -> Iterator[Any]:
        yield from np.split(logits, [3, 6], axis=1)  # 3, 3 and 1 positions

    beside = runs.Told(SimpleNamespace(blocks=blocks))  # type: ignore[arg-type]
    stored = runs.Stored(logits, beside)
    stored.numbers = [0, 1]
    ids = np.zeros((2, 16), np.int32)
    others = stored.blocks(ids)
    seen = 0
    for block in beside.blocks(ids):
        assert np.array_equal(next(others), block)
        seen += block.shape[1]
    assert seen == 7


def test_a_programs_memory_is_its_own_and_not_what_we_hold() -> None:
    held = np.ones(300 << 20, np.uint8)
    small = runs.run([sys.executable, "-c", "pass"])
    large = runs.run([sys.executable, "-c", "held = bytearray(b'x' * (200 << 20))"])
    assert held[-1]
    assert small.rss < 100 << 20 < 200 << 20 <= large.rss
    assert small.seconds >= 0 and small.cpu > 0


def test_a_program_that_fails_is_told_in_its_own_words() -> None:
    with pytest.raises(runs.Failed, match="no such thing"):
        runs.run([sys.executable, "-c", "raise SystemExit('no such thing')"])
    with pytest.raises(
        runs.Failed, match="exit 134"
    ):  # as a shell tells a signal: an abort of llama.cpp's
        runs.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 6)"])
