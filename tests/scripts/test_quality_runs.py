"""scripts/quality/runs.py: the measured cost of programs, and the stored logits of the reference
model.
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripts.quality import runs


def test_stored_logits_come_in_blocks_as_long_as_the_other_scorers() -> None:
    logits = np.arange(2 * 7 * 3, dtype=np.float32).reshape(2, 7, 3)

    def blocks(ids: Any) -> Iterator[Any]:
        yield from np.split(logits, [3, 6], axis=1)  # 3, 3 and 1 positions

    recorder = runs.WidthRecorder(SimpleNamespace(blocks=blocks))  # type: ignore[arg-type]
    stored = runs.StoredLogits(logits, recorder)
    stored.numbers = [0, 1]
    ids = np.zeros((2, 16), np.int32)
    stored_blocks = stored.blocks(ids)
    n_positions = 0
    for block in recorder.blocks(ids):
        assert np.array_equal(next(stored_blocks), block)
        n_positions += block.shape[1]
    assert n_positions == 7


def test_the_memory_of_this_process_does_not_count_as_the_programs() -> None:
    large_array = np.ones(300 << 20, np.uint8)
    small = runs.run([sys.executable, "-c", "pass"])
    large = runs.run([sys.executable, "-c", "data = bytearray(b'x' * (200 << 20))"])
    assert large_array[-1]
    assert small.rss < 100 << 20 < 200 << 20 <= large.rss
    assert small.seconds >= 0 and small.cpu > 0


def test_the_error_has_the_output_of_the_program_or_its_exit_code() -> None:
    with pytest.raises(runs.Failed, match="no such thing"):
        runs.run([sys.executable, "-c", "raise SystemExit('no such thing')"])
    # 128 + SIGABRT, as in a shell; llama.cpp aborts this way.
    with pytest.raises(runs.Failed, match="exit 134"):
        runs.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 6)"])
