"""Reading ahead: the same rows, started in writing order, with a bounded number in flight."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.quantize import pipeline, plan, write
from quant.quantize import read_ahead as module
from quant.quantize.read_ahead import read_ahead
from quant.recipes.file_types import ModelFacts
from quant.source.source import Source, Weight


class Shelf:
    """Weights of rows that say what they are; remembers what was read, and how many reads were
    under way at once.
    """

    def __init__(self, *rows: int, fails: tuple[int, int] | None = None) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.under_way, self.most, self.fails = 0, 0, fails
        self.lock = threading.Lock()
        weights = tuple(
            Weight(f"w{at}", (8, count), "F32", lambda a, b, at=at: self.read(at, a, b))  # type: ignore[misc]
            for at, count in enumerate(rows)
        )
        facts = ModelFacts(architecture="llama", layers=1, heads=1, kv_heads=1, experts=0)
        self.source = Source(Path("x"), (), "x", facts, (), weights, 32)

    def read(self, at: int, first: int, last: int) -> Any:
        with self.lock:
            self.asked.append((at, first, last))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            if self.fails and (at, first) == self.fails:
                raise UserError("gone")
            values = np.repeat(np.arange(first, last, dtype=np.float32)[:, None] + 1000 * at, 8, 1)
            return values.view(np.uint8)
        finally:
            with self.lock:
                self.under_way -= 1


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 80)  # ten rows


def slabs(source: Source, begin: tuple[int, int] = (0, 0)) -> list[tuple[int, int, int]]:
    """What writing asks for."""
    found = []
    for at, weight in enumerate(source.weights):
        start = begin[1] if at == begin[0] else 0
        found += [
            (at, first, min(first + 10, weight.rows))
            for first in range(start, weight.rows, 10)
            if at >= begin[0]
        ]
    return found


@pytest.mark.parametrize("begin", [(0, 0), (1, 0), (1, 7)])
def test_every_row_comes_once_in_its_place_wherever_writing_begins(begin: tuple[int, int]) -> None:
    shelf = Shelf(25, 40, 3, 11)
    reader = read_ahead(shelf.source)
    for at, first, last in slabs(shelf.source, begin):
        rows = reader.weights[at].read(first, last).view(np.float32)
        assert rows[:, 0].tolist() == [1000 * at + row for row in range(first, last)]
    assert sorted(shelf.asked) == slabs(shelf.source, begin)
    assert len(shelf.asked) == len(set(shelf.asked))


def test_no_more_is_begun_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_AHEAD_BYTES", 3 * 10 * 32)
    shelf = Shelf(400)
    reader = read_ahead(shelf.source)
    reader.weights[0].read(0, 10)
    assert len(shelf.asked) <= 4
    monkeypatch.setattr(module, "READ_AHEAD_BYTES", 1 << 30)
    reader.weights[0].read(10, 20)
    assert len(shelf.asked) <= 2 + module.MAX_READS


def test_a_read_that_nobody_foresaw_is_right_too() -> None:
    shelf = Shelf(40, 40)
    reader = read_ahead(shelf.source)
    for at, first, last in [(1, 5, 9), (0, 30, 40), (0, 30, 40), (1, 0, 1)]:
        rows = reader.weights[at].read(first, last).view(np.float32)
        assert rows[:, 0].tolist() == [1000 * at + row for row in range(first, last)]


def test_what_goes_wrong_ahead_is_raised_when_its_rows_are_wanted() -> None:
    shelf = Shelf(40, fails=(0, 20))
    reader = read_ahead(shelf.source)
    reader.weights[0].read(0, 10)
    reader.weights[0].read(10, 20)
    with pytest.raises(UserError, match="gone"):
        reader.weights[0].read(20, 30)


def test_a_file_made_of_what_was_read_ahead_is_the_same(
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
