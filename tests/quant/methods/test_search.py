"""The searches in C and with torch reach the error of the numpy search."""

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
    return ggml.Importance(vectors, 10)  # three experts, of which the last has fewer rows


def weighted_error(fields, type: str, rows: np.ndarray, importance: ggml.Importance) -> float:
    differences = FORMATS[type].value(fields).reshape(rows.shape).astype(np.float64) - rows
    return sum(
        float(differences[first:last] ** 2 @ vector @ np.ones(last - first))
        for first, last, vector in importance.spans(0, len(rows))
    )


def search_with_arrays(
    rows: np.ndarray, importance, type: str, settings: FormatSearchSettings, ops: ArrayBackend
):
    return search.search_fields(
        rows, importance, FORMATS[type], settings, ops, settings.numpy_effort
    )


@pytest.mark.usefixtures("each_kernel_level")
@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_c_search_equals_numpy_and_is_not_worse_with_more_effort(
    type: str, spread: float, rows, importance
) -> None:
    if ggml.native_search() is None:
        pytest.skip("our search is not installed")
    settings = replace(SEARCH_SETTINGS[type], value_spread=spread)
    numpy_error = weighted_error(
        search_with_arrays(rows, importance, type, settings, array_backend()),
        type,
        rows,
        importance,
    )
    equal_effort, full_effort = (
        FORMATS[type].unpack(search._search_in_c(rows, importance, FORMATS[type], effort))
        for effort in (replace(settings, native_effort=settings.numpy_effort), settings)
    )
    assert weighted_error(equal_effort, type, rows, importance) == pytest.approx(
        numpy_error, rel=3e-3
    )
    assert weighted_error(full_effort, type, rows, importance) < 1.003 * numpy_error


@pytest.mark.usefixtures("each_kernel_level")
@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_c_packs_the_blocks_of_the_format(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, settings, format = np.random.default_rng(3), SEARCH_SETTINGS[type], FORMATS[type]
    low, high = settings.scale_range or (0, 0)
    levels = rng.integers(
        format.low - format.zero, format.high - format.zero + 1, (9, settings.block_values)
    )
    d, m = rng.normal(0, 0.1, (2, 9)).astype(np.float16).astype(np.float32)
    scales, mins = rng.integers(low, high + 1, (2, 9, settings.groups))
    result = ggml.ScaleSearchResult(
        levels.astype(np.int16), d, m, scales.astype(np.int16), mins.astype(np.int16)
    )
    blocks = search.pack_search_result(result, format, settings)
    fields = format.unpack(blocks)
    assert (fields.codes - format.zero == levels).all()
    assert (fields.d == d).all()
    assert settings.max_minimum is None or (fields.m == m).all()
    assert settings.scale_range is None or (fields.scales == scales).all()
    assert (
        settings.scale_range is None or settings.max_minimum is None or (fields.mins == mins).all()
    )
    monkeypatch.setattr(ggml, "pack_blocks", lambda result, name: None)
    assert search.pack_search_result(result, format, settings).tobytes() == blocks.tobytes()


@pytest.mark.parametrize("type", ["Q2_K", "Q3_K", "Q4_K", "Q5_1", "Q8_0"])
def test_torch_search_equals_numpy(type: str, rows, importance) -> None:
    pytest.importorskip("torch")
    settings = SEARCH_SETTINGS[type]
    numpy_fields, torch_fields = (
        search_with_arrays(rows, importance, type, settings, ops)
        for ops in (array_backend(), TorchBackend("cpu"))
    )
    assert weighted_error(torch_fields, type, rows, importance) == pytest.approx(
        weighted_error(numpy_fields, type, rows, importance), rel=3e-3
    )
    assert (torch_fields.codes == numpy_fields.codes).mean() > 0.97


@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_importance_moves_the_error_to_unimportant_columns(type: str, rows) -> None:
    vector = np.where(np.arange(COLUMNS) % 2, 1, 1e-3).astype(np.float32)
    weighted = search_with_arrays(
        rows, ggml.Importance(vector[None], ROWS), type, SEARCH_SETTINGS[type], array_backend()
    )
    plain = search_with_arrays(rows, None, type, SEARCH_SETTINGS[type], array_backend())
    errors = [
        np.square(FORMATS[type].value(fields).reshape(rows.shape) - rows)[:, 1::2].sum()
        for fields in (weighted, plain)
    ]
    assert errors[0] < 0.97 * errors[1]
