"""Tests that every quantization method of the registry must pass.

Each method is compared with libggml's search, with the decoder of the gguf package, and with its
own result on other spans of rows. A new module of quant/methods is tested without changes here.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.calibration.imatrix import ImatrixEntry
from quant.calibration.statistics import InputStatistics
from quant.errors import DamagedSourceError
from quant.formats import FORMATS
from quant.methods import METHODS
from quant.methods.base import Method
from quant.native.ggml import block_size, decode
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from tests.quant import tiny_gguf

COLUMNS, ROWS = 512, 24
TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
OUR_METHODS = [method for method in METHODS.values() if method.name != "ggml"]


@dataclass(frozen=True)
class DiagonalMoments:
    """Second moments of uncorrelated inputs: the matrix is diagonal, with the values `vector`."""

    vector: np.ndarray
    columns: int = COLUMNS
    matrices: int = 1
    mixed: bool = False

    def mean(self, matrix: int = 0) -> np.ndarray:
        return np.diag(self.vector)

    def squares(self, matrix: int = 0) -> np.ndarray:
        return self.vector


@pytest.fixture(params=OUR_METHODS, ids=lambda method: method.name)
def method(request: pytest.FixtureRequest) -> Method:
    return request.param


@pytest.fixture
def importance() -> np.ndarray:
    return np.exp(np.random.default_rng(7).normal(0, 1, COLUMNS)).astype(np.float32)


def make_statistics(importance: np.ndarray | None, folder: Path) -> InputStatistics:
    if importance is None:
        return InputStatistics("blk.0.ffn_up.weight", COLUMNS, ROWS)
    file = folder / "sums"
    file.write_bytes(importance.astype("<f4").tobytes())
    sums = ImatrixEntry(file, 0, COLUMNS, (1.0,))
    return InputStatistics(
        "blk.0.ffn_up.weight", COLUMNS, ROWS, 1, sums, DiagonalMoments(importance)
    )


def random_rows(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 0.02, (ROWS, COLUMNS))
    if kind == "outliers":
        rows[rng.random(rows.shape) < 0.01] *= 12
    return rows.astype(np.float32)


def encode_and_decode(
    method: Method, type: str, rows: np.ndarray, statistics: InputStatistics
) -> np.ndarray:
    return decode(
        method.make_encoder(FORMATS[type], statistics)(rows, 0), type, COLUMNS, label="made"
    )


def weighted_error(
    method: Method, type: str, rows: np.ndarray, importance: np.ndarray, statistics: InputStatistics
) -> float:
    differences = encode_and_decode(method, type, rows, statistics).astype(np.float64) - rows
    return float((np.square(differences) * importance).sum())


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("kind", ["random", "outliers"])
def test_weighted_error_is_below_that_of_ggml(
    kind, type, method: Method, importance, tmp_path
) -> None:
    rows, statistics = random_rows(kind), make_statistics(importance, tmp_path)
    while not method.can_encode(FORMATS[type], statistics):  # a plan also uses the fallback
        method = METHODS[method.fallback]
    assert method.name != "ggml"
    assert weighted_error(method, type, rows, importance, statistics) < weighted_error(
        METHODS["ggml"], type, rows, importance, statistics
    )


@pytest.mark.parametrize("type", TYPES)
def test_blocks_decode_the_same_with_gguf_and_our_formats(
    type: str, method: Method, importance, tmp_path: Path
) -> None:
    encoded = method.make_encoder(FORMATS[type], make_statistics(importance, tmp_path))(
        random_rows("outliers"), 0
    )
    blocks = encoded.reshape(-1, block_size(type).nbytes)
    values = FORMATS[type].value(FORMATS[type].unpack(blocks)).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(
        gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[type]), values
    )
    np.testing.assert_array_equal(FORMATS[type].pack(FORMATS[type].unpack(blocks)), blocks)


@pytest.mark.parametrize("type", TYPES)
def test_rows_do_not_depend_on_their_span(
    type: str, method: Method, importance, tmp_path: Path
) -> None:
    rows, solve = (
        random_rows("outliers"),
        method.make_encoder(FORMATS[type], make_statistics(importance, tmp_path)),
    )
    expected = solve(rows, 0)
    spans = [solve(rows[first:last], first) for first, last in ((0, 1), (1, 2), (2, 9), (9, ROWS))]
    np.testing.assert_array_equal(np.concatenate(spans), expected)


@pytest.mark.parametrize("type", TYPES)
def test_unusual_rows_have_at_most_the_error_of_ggml(
    type: str, method: Method, importance, tmp_path: Path
) -> None:
    rows = random_rows("random")
    rows[0], rows[1], rows[2], rows[3] = 0, 0.25, -0.25, 1e-41
    rows[4, 7], rows[5, :256], rows[6], rows[7] = 3e3, 0, abs(rows[6]) + 1, -abs(rows[7]) - 1
    for vector in (
        importance,
        np.zeros_like(importance),
        np.where(np.arange(COLUMNS) % 7, 0, importance),
    ):
        statistics = make_statistics(vector, tmp_path)
        decoded = encode_and_decode(method, type, rows, statistics)
        ggml_decoded = (
            encode_and_decode(METHODS["ggml"], type, rows, statistics)
            if vector is importance
            else decoded
        )
        assert np.isfinite(decoded).all()
        assert not decoded[[0, 3]].any()
        error, ggml_error, energy = (
            np.square(values - rows, dtype=np.float64) @ importance
            for values in (decoded, ggml_decoded, 0)
        )
        assert (error <= 1.05 * ggml_error + 1e-5 * energy)[
            3:8
        ].all()  # the allowed excess is the rounding error of an F16 scale
        assert (np.square(decoded - rows).sum(1)[1:3] <= 1e-4 * np.square(rows[1:3]).sum(1)).all()


def test_method_works_or_falls_back_without_an_imatrix(method: Method, tmp_path: Path) -> None:
    statistics = make_statistics(None, tmp_path)
    if not method.can_encode(FORMATS["Q4_K"], statistics):
        assert METHODS[method.fallback].can_encode(FORMATS["Q4_K"], statistics)
        return
    rows, uniform = random_rows("random"), np.ones(COLUMNS, np.float32)
    for type in TYPES:
        ggml_error = weighted_error(METHODS["ggml"], type, rows, uniform, statistics)
        assert weighted_error(method, type, rows, uniform, statistics) < 1.02 * ggml_error


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "NaN"), (np.inf, "NaN"), (3e9, "does not fit"), (9e8, "fit")]
)
def test_values_out_of_range_are_refused_by_tensor_name(
    value, message, method: Method, importance, tmp_path: Path
) -> None:
    rows = random_rows("random")
    rows[3, 3] = value
    with pytest.raises(DamagedSourceError, match=f"blk.0.ffn_up.weight.*{message}"):
        method.make_encoder(FORMATS["Q4_K"], make_statistics(importance, tmp_path))(rows, 0)


def test_interrupted_run_ends_with_the_same_bytes(
    method: Method, tmp_path: Path, monkeypatch
) -> None:
    plan = plan_quantization(
        write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1)),
        "Q4_K_M",
        method=method.name,
    )
    complete, resumed = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write.write_model(plan, complete, threads=1)

    def stop(progress: write.WriteProgress) -> None:
        if progress.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan, resumed, threads=2, on_tensor=stop)
    report = write.write_model(plan, resumed, threads=3)
    assert report.resumed >= 4
    assert complete.read_bytes() == resumed.read_bytes()
    assert write.is_finished(plan, resumed)
    assert not write.is_finished(plan_quantization(plan.source, "Q4_K_M"), resumed)


def test_file_begun_with_another_backend_is_not_resumed(tmp_path: Path, monkeypatch) -> None:
    plan = plan_quantization(
        write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1)), "Q4_K_M", method="search"
    )
    out = tmp_path / "out.gguf"

    def stop(progress: write.WriteProgress) -> None:
        if progress.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan, out, on_tensor=stop)
    monkeypatch.setattr(type(METHODS["search"]), "backend_name", lambda self: "an abacus")
    assert write.write_model(plan, out).resumed == 0
