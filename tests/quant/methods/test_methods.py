"""What every method promises, whatever it does: one contract for the whole registry.

A new leaf of quant/methods is held against libggml's own search, the gguf package's reading, and
itself.
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
OURS = [method for method in METHODS.values() if method.name != "ggml"]


@dataclass(frozen=True)
class Known:
    """Second moments of inputs that do not depend on one another."""

    vector: np.ndarray
    columns: int = COLUMNS
    matrices: int = 1
    mixed: bool = False

    def mean(self, matrix: int = 0) -> np.ndarray:
        return np.diag(self.vector)

    def squares(self, matrix: int = 0) -> np.ndarray:
        return self.vector


@pytest.fixture(params=OURS, ids=lambda method: method.name)
def method(request: pytest.FixtureRequest) -> Method:
    return request.param


@pytest.fixture
def importance() -> np.ndarray:
    return np.exp(np.random.default_rng(7).normal(0, 1, COLUMNS)).astype(np.float32)


def evidence(importance: np.ndarray | None, folder: Path) -> InputStatistics:
    if importance is None:
        return InputStatistics("blk.0.ffn_up.weight", COLUMNS, ROWS)
    file = folder / "sums"
    file.write_bytes(importance.astype("<f4").tobytes())
    sums = ImatrixEntry(file, 0, COLUMNS, (1.0,))
    return InputStatistics("blk.0.ffn_up.weight", COLUMNS, ROWS, 1, sums, Known(importance))


def drawn(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 0.02, (ROWS, COLUMNS))
    if kind == "outliers":
        rows[rng.random(rows.shape) < 0.01] *= 12
    return rows.astype(np.float32)


def solved(method: Method, type: str, rows: np.ndarray, known: InputStatistics) -> np.ndarray:
    return decode(method.make_encoder(FORMATS[type], known)(rows, 0), type, COLUMNS, label="made")


def lost(
    method: Method, type: str, rows: np.ndarray, importance: np.ndarray, known: InputStatistics
) -> float:
    off = solved(method, type, rows, known).astype(np.float64) - rows
    return float((np.square(off) * importance).sum())


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("kind", ["random", "outliers"])
def test_the_weighted_error_is_below_that_of_ggmls_search(
    kind, type, method: Method, importance, tmp_path
) -> None:
    rows, known = drawn(kind), evidence(importance, tmp_path)
    while not method.can_encode(FORMATS[type], known):  # as a plan does
        method = METHODS[method.fallback]
    assert method.name != "ggml"
    assert lost(method, type, rows, importance, known) < lost(
        METHODS["ggml"], type, rows, importance, known
    )


@pytest.mark.parametrize("type", TYPES)
def test_the_blocks_say_the_same_to_every_reader(
    type: str, method: Method, importance, tmp_path: Path
) -> None:
    made = method.make_encoder(FORMATS[type], evidence(importance, tmp_path))(drawn("outliers"), 0)
    blocks = made.reshape(-1, block_size(type).nbytes)
    value = FORMATS[type].value(FORMATS[type].unpack(blocks)).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(
        gguf.quants.dequantize(made, gguf.GGMLQuantizationType[type]), value
    )
    np.testing.assert_array_equal(FORMATS[type].pack(FORMATS[type].unpack(blocks)), blocks)


@pytest.mark.parametrize("type", TYPES)
def test_rows_do_not_depend_on_how_they_are_cut(
    type: str, method: Method, importance, tmp_path: Path
) -> None:
    rows, solve = (
        drawn("outliers"),
        method.make_encoder(FORMATS[type], evidence(importance, tmp_path)),
    )
    whole = solve(rows, 0)
    cut = [solve(rows[first:last], first) for first, last in ((0, 1), (1, 2), (2, 9), (9, ROWS))]
    np.testing.assert_array_equal(np.concatenate(cut), whole)


@pytest.mark.parametrize("type", TYPES)
def test_odd_rows_are_rounded_as_well_as_by_ggml(
    type: str, method: Method, importance, tmp_path: Path
) -> None:
    rows = drawn("random")
    rows[0], rows[1], rows[2], rows[3] = 0, 0.25, -0.25, 1e-41
    rows[4, 7], rows[5, :256], rows[6], rows[7] = 3e3, 0, abs(rows[6]) + 1, -abs(rows[7]) - 1
    for vector in (
        importance,
        np.zeros_like(importance),
        np.where(np.arange(COLUMNS) % 7, 0, importance),
    ):
        known = evidence(vector, tmp_path)
        made = solved(method, type, rows, known)
        other = solved(METHODS["ggml"], type, rows, known) if vector is importance else made
        assert np.isfinite(made).all()
        assert not made[[0, 3]].any()
        off, theirs, all_ = (
            np.square(found - rows, dtype=np.float64) @ importance for found in (made, other, 0)
        )
        assert (off <= 1.05 * theirs + 1e-5 * all_)[
            3:8
        ].all()  # an F16 of a scale is off by as much
        assert (np.square(made - rows).sum(1)[1:3] <= 1e-4 * np.square(rows[1:3]).sum(1)).all()


def test_without_an_imatrix_it_does_what_it_can(method: Method, tmp_path: Path) -> None:
    known = evidence(None, tmp_path)
    if not method.can_encode(FORMATS["Q4_K"], known):
        assert METHODS[method.fallback].can_encode(FORMATS["Q4_K"], known)
        return
    rows, even = drawn("random"), np.ones(COLUMNS, np.float32)
    for type in TYPES:
        ggml = lost(METHODS["ggml"], type, rows, even, known)
        assert lost(method, type, rows, even, known) < 1.02 * ggml


@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, "NaN"), (np.inf, "NaN"), (3e9, "does not fit"), (9e8, "fit")]
)
def test_what_cannot_be_held_is_refused_by_name(
    value, words, method: Method, importance, tmp_path: Path
) -> None:
    rows = drawn("random")
    rows[3, 3] = value
    with pytest.raises(DamagedSourceError, match=f"blk.0.ffn_up.weight.*{words}"):
        method.make_encoder(FORMATS["Q4_K"], evidence(importance, tmp_path))(rows, 0)


def test_a_run_that_was_stopped_ends_with_the_same_bytes(
    method: Method, tmp_path: Path, monkeypatch
) -> None:
    plan = plan_quantization(
        write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1)),
        "Q4_K_M",
        method=method.name,
    )
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write.write_model(plan, one, threads=1)

    def stop(progress: write.WriteProgress) -> None:
        if progress.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan, two, threads=2, on_tensor=stop)
    report = write.write_model(plan, two, threads=3)
    assert report.resumed >= 4
    assert one.read_bytes() == two.read_bytes()
    assert write.is_finished(plan, two)
    assert not write.is_finished(plan_quantization(plan.source, "Q4_K_M"), two)


def test_what_other_means_began_is_made_anew(tmp_path: Path, monkeypatch) -> None:
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
