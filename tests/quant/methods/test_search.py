"""The numpy search is the reference; the C and torch versions find results as good."""

from dataclasses import replace

import numpy as np
import pytest

from quant.formats import FORMATS
from quant.methods import search
from quant.methods.search_settings import SEARCH_SETTINGS, FormatSearchSettings
from quant.native import ggml
from quant.native.array_backends import ArrayBackend, TorchBackend, array_backend

COLUMNS, ROWS = 512, 24


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return (np.random.default_rng(1).standard_t(5, (ROWS, COLUMNS)) * 0.02).astype(np.float32)


@pytest.fixture(scope="module")
def importance() -> ggml.Importance:
    vectors = np.exp(np.random.default_rng(2).normal(0, 1, (3, COLUMNS))).astype(np.float32)
    return ggml.Importance(vectors, 10)  # three experts, the last one cut short


def lost(fields, type: str, rows: np.ndarray, importance: ggml.Importance) -> float:
    off = FORMATS[type].value(fields).reshape(rows.shape).astype(np.float64) - rows
    return sum(
        float(off[a:b] ** 2 @ vector @ np.ones(b - a))
        for a, b, vector in importance.spans(0, len(rows))
    )


def by_arrays(
    rows: np.ndarray, importance, type: str, grid: FormatSearchSettings, ops: ArrayBackend
):
    return search.search_fields(rows, importance, FORMATS[type], grid, ops, grid.numpy_effort)


@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_c_finds_what_numpy_finds_and_more_with_more_effort(
    type: str, spread: float, rows, importance
) -> None:
    if ggml.native_search() is None:
        pytest.skip("this build of llama.cpp has no search of ours: it is for x86-64 and GCC")
    grid = replace(SEARCH_SETTINGS[type], value_spread=spread)
    slow = lost(by_arrays(rows, importance, type, grid, array_backend()), type, rows, importance)
    same, more = (
        FORMATS[type].unpack(search._search_in_c(rows, importance, FORMATS[type], each))
        for each in (replace(grid, native_effort=grid.numpy_effort), grid)
    )
    assert lost(same, type, rows, importance) == pytest.approx(slow, rel=3e-3)
    assert lost(more, type, rows, importance) < 1.003 * slow


@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_c_puts_into_blocks_what_the_format_puts_there(
    type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, grid, format = np.random.default_rng(3), SEARCH_SETTINGS[type], FORMATS[type]
    low, high = grid.scale_range or (0, 0)
    levels = rng.integers(
        format.low - format.zero, format.high - format.zero + 1, (9, grid.block_values)
    )
    d, m = rng.normal(0, 0.1, (2, 9)).astype(np.float16).astype(np.float32)
    scales, mins = rng.integers(low, high + 1, (2, 9, grid.groups))
    found = ggml.ScaleSearchResult(
        levels.astype(np.int16), d, m, scales.astype(np.int16), mins.astype(np.int16)
    )
    made = search.pack_search_result(found, format, grid)
    fields = format.unpack(made)
    assert (fields.codes - format.zero == levels).all()
    assert (fields.d == d).all()
    assert grid.max_minimum is None or (fields.m == m).all()
    assert grid.scale_range is None or (fields.scales == scales).all()
    assert grid.scale_range is None or grid.max_minimum is None or (fields.mins == mins).all()
    monkeypatch.setattr(ggml, "pack_blocks", lambda found, name: None)
    assert search.pack_search_result(found, format, grid).tobytes() == made.tobytes()


@pytest.mark.parametrize("type", ["Q2_K", "Q3_K", "Q4_K", "Q5_1", "Q8_0"])
def test_torch_finds_what_numpy_finds(type: str, rows, importance) -> None:
    pytest.importorskip("torch")
    grid = SEARCH_SETTINGS[type]
    slow, same = (
        by_arrays(rows, importance, type, grid, ops)
        for ops in (array_backend(), TorchBackend("cpu"))
    )
    assert lost(same, type, rows, importance) == pytest.approx(
        lost(slow, type, rows, importance), rel=3e-3
    )
    assert (same.codes == slow.codes).mean() > 0.97


@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_importance_moves_the_error_to_where_it_does_not_matter(type: str, rows) -> None:
    vector = np.where(np.arange(COLUMNS) % 2, 1, 1e-3).astype(np.float32)
    weighed = by_arrays(
        rows, ggml.Importance(vector[None], ROWS), type, SEARCH_SETTINGS[type], array_backend()
    )
    plain = by_arrays(rows, None, type, SEARCH_SETTINGS[type], array_backend())
    off = [
        np.square(FORMATS[type].value(fields).reshape(rows.shape) - rows)[:, 1::2].sum()
        for fields in (weighed, plain)
    ]
    assert off[0] < 0.97 * off[1]
