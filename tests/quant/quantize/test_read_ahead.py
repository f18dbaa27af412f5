"""Reading ahead gives the same rows, starts in the order of writing, and limits the open reads."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.quantize import pipeline, plan, write
from quant.quantize import read_ahead as read_ahead_module
from quant.quantize.read_ahead import read_ahead
from quant.recipes.file_types import ModelFacts
from quant.source.source import Source, Weight


class RecordingSource:
    """A source of weights that records its reads in `reads`: (number of the weight, first, last).

    The weights have `rows` rows each. Every value is its row number plus 1000 times the number of
    the weight. The read of the weight and first row `fails` raises a UserError.
    """

    def __init__(self, *rows: int, fails: tuple[int, int] | None = None) -> None:
        self.reads: list[tuple[int, int, int]] = []
        self.fails = fails
        self.lock = threading.Lock()
        weights = tuple(
            Weight(f"w{number}", (8, count), "F32", partial(self.read, number))
            for number, count in enumerate(rows)
        )
        facts = ModelFacts(architecture="llama", layers=1, heads=1, kv_heads=1, experts=0)
        self.source = Source(Path("x"), (), "x", facts, (), weights, 32)

    def read(self, number: int, first: int, last: int) -> Any:
        with self.lock:
            self.reads.append((number, first, last))
        if self.fails and (number, first) == self.fails:
            raise UserError("gone")
        values = np.repeat(np.arange(first, last, dtype=np.float32)[:, None] + 1000 * number, 8, 1)
        return values.view(np.uint8)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 80)  # ten rows


def expected_reads(
    source: Source, first_read: tuple[int, int] = (0, 0)
) -> list[tuple[int, int, int]]:
    """Return the reads of a writer that starts with the weight and row `first_read`."""
    reads = []
    for number, weight in enumerate(source.weights):
        start = first_read[1] if number == first_read[0] else 0
        reads += [
            (number, first, min(first + 10, weight.rows))
            for first in range(start, weight.rows, 10)
            if number >= first_read[0]
        ]
    return reads


@pytest.mark.parametrize("first_read", [(0, 0), (1, 0), (1, 7)])
def test_each_row_is_read_once_for_any_first_row(first_read: tuple[int, int]) -> None:
    recorder = RecordingSource(25, 40, 3, 11)
    reader = read_ahead(recorder.source)
    for number, first, last in expected_reads(recorder.source, first_read):
        rows = reader.weights[number].read(first, last).view(np.float32)
        assert rows[:, 0].tolist() == [1000 * number + row for row in range(first, last)]
    assert sorted(recorder.reads) == expected_reads(recorder.source, first_read)
    assert len(recorder.reads) == len(set(recorder.reads))


def test_number_of_started_reads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead_module, "READ_AHEAD_BYTES", 3 * 10 * 32)
    recorder = RecordingSource(400)
    reader = read_ahead(recorder.source)
    reader.weights[0].read(0, 10)
    assert len(recorder.reads) <= 4
    monkeypatch.setattr(read_ahead_module, "READ_AHEAD_BYTES", 1 << 30)
    reader.weights[0].read(10, 20)
    assert len(recorder.reads) <= 2 + read_ahead_module.MAX_READS


def test_reads_out_of_order_are_correct() -> None:
    recorder = RecordingSource(40, 40)
    reader = read_ahead(recorder.source)
    for number, first, last in [(1, 5, 9), (0, 30, 40), (0, 30, 40), (1, 0, 1)]:
        rows = reader.weights[number].read(first, last).view(np.float32)
        assert rows[:, 0].tolist() == [1000 * number + row for row in range(first, last)]


def test_error_of_an_early_read_is_raised_when_its_rows_are_read() -> None:
    recorder = RecordingSource(40, fails=(0, 20))
    reader = read_ahead(recorder.source)
    reader.weights[0].read(0, 10)
    reader.weights[0].read(10, 20)
    with pytest.raises(UserError, match="gone"):
        reader.weights[0].read(20, 30)


def test_reading_ahead_does_not_change_the_file(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 4000)
    plain = checkpoint_source.open_checkpoint(stories)
    for name, source in (
        ("plain", plain),
        ("ahead", read_ahead(checkpoint_source.open_checkpoint(stories))),
    ):
        write.write_model(plan.plan_quantization(source, "Q8_0"), tmp_path / name, threads=2)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "ahead").read_bytes()
