"""GPTQ reduces the output error of a layer, for all kinds of second moments and ggml formats."""

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quant.calibration.imatrix import ImatrixEntry
from quant.calibration.moments import load_moments
from quant.calibration.moments_writer import MomentSums, write_moments
from quant.calibration.statistics import InputStatistics
from quant.errors import UserError
from quant.formats import FORMATS
from quant.methods import METHODS, gptq
from quant.methods.base import MethodReport
from quant.methods.error_feedback import output_errors
from quant.methods.gptq import PANEL_ROW_MULTIPLE, PANEL_ROWS, panel_rows
from quant.methods.hessian_factor import DAMPING, factor_moments
from quant.native import array_backends, ggml
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from quant.recipes import file_types, tensor_types
from tests.quant import tiny_gguf

K_QUANTS, LEGACY_QUANTS = (
    ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
)
ROWS = 32


@dataclass(frozen=True)
class FixedMoments:
    """Second moments with given means, in place of a moments file."""

    means: np.ndarray = field(repr=False)  # [matrices, columns, columns]
    mixed: bool = False

    @property
    def columns(self) -> int:
        return self.means.shape[1]

    @property
    def matrices(self) -> int:
        return len(self.means)

    def mean(self, matrix: int = 0) -> np.ndarray:
        return self.means[matrix].astype(np.float32)

    def squares(self, matrix: int = 0) -> np.ndarray:
        return self.mean(matrix).diagonal().copy()


@cache
def _cached_moments(columns: int, tokens: int, seed: int) -> np.ndarray:
    """Return second moments [columns, columns] of inputs with a few dominant directions.

    Every 97th channel is 5 times larger than the others.
    """
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(columns, columns)))
    inputs = (rng.normal(size=(tokens, columns)) * np.arange(1, columns + 1) ** -0.4) @ basis.T
    inputs[:, ::97] *= 5
    return inputs.T @ inputs / tokens


def correlated_moments(columns: int, tokens: int = 1200, seed: int = 0) -> np.ndarray:
    return _cached_moments(columns, tokens, seed).copy()


def make_statistics(moments: np.ndarray, folder: Path, rows: int = ROWS) -> InputStatistics:
    """Return the input statistics of a weight, from its moments and an imatrix of their diagonal.

    The imatrix is written to the file `sums` in `folder`.
    """
    moments = moments.reshape(-1, *moments.shape[-2:])
    file = folder / "sums"
    squares = moments.diagonal(axis1=1, axis2=2).astype("<f4")
    file.write_bytes(squares.tobytes())
    sums = ImatrixEntry(file, 0, squares.size, (1.0,) * len(moments))
    return InputStatistics(
        "blk.0.ffn_up.weight", moments.shape[-1], rows, len(moments), sums, FixedMoments(moments)
    )


def random_rows(columns: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.02, (rows, columns)).astype(np.float32)


def encode(method: str, type: str, rows: np.ndarray, statistics: InputStatistics) -> np.ndarray:
    return METHODS[method].make_encoder(FORMATS[type], statistics)(rows, 0)


def output_error(blocks: np.ndarray, type: str, rows: np.ndarray, moments: np.ndarray) -> float:
    """Return the squared error of the layer's output over all rows, decoded by the gguf package."""
    differences = (
        gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type]).astype(np.float64) - rows
    )
    return float(((differences @ moments) * differences).sum())


@pytest.mark.parametrize(
    ("type", "columns"),
    [(type, 512) for type in K_QUANTS] + [(type, 576) for type in LEGACY_QUANTS],
)
def test_output_error_is_smaller_than_that_of_imatrix_methods(
    type: str, columns: int, tmp_path: Path
) -> None:
    moments, rows = correlated_moments(columns), random_rows(columns)
    statistics = make_statistics(moments, tmp_path)
    errors = {
        name: output_error(encode(name, type, rows, statistics), type, rows, moments)
        for name in ("ggml", "search", "gptq")
    }
    assert errors["gptq"] < 0.8 * min(errors["ggml"], errors["search"])


@pytest.mark.parametrize("type", ["Q4_K", "Q8_0"])
def test_rows_do_not_depend_on_their_span(type: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gptq, "PANEL_ROWS", 64)
    statistics = make_statistics(correlated_moments(256), tmp_path, rows=150)
    rows, solve = random_rows(256, 150), METHODS["gptq"].make_encoder(FORMATS[type], statistics)
    expected = solve(rows, 0)
    cuts = (0, 1, 20, 100, 149, 150)
    spans = [solve(rows[first:last], first) for first, last in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(spans), expected)


def test_row_without_improvement_keeps_the_codes_of_search(tmp_path: Path, monkeypatch) -> None:
    moments, rows = correlated_moments(256), random_rows(256)
    statistics, round_with_feedback = make_statistics(moments, tmp_path), gptq.round_with_feedback

    def damaged_feedback(*args: object) -> tuple[list, object, object]:
        """Round as usual, but set the codes of every second row to 0."""
        grids, levels, errors = round_with_feedback(*args)
        levels[:, ::2], errors[::2] = 0, 1e9
        return grids, levels, errors

    undamaged = encode("gptq", "Q4_K", rows, statistics)
    monkeypatch.setattr(gptq, "round_with_feedback", damaged_feedback)
    solve = METHODS["gptq"].make_encoder(FORMATS["Q4_K"], statistics)
    blocks = solve(rows, 0)
    np.testing.assert_array_equal(blocks[::2], encode("search", "Q4_K", rows, statistics)[::2])
    np.testing.assert_array_equal(blocks[1::2], undamaged[1::2])
    assert METHODS["gptq"].report(solve) == MethodReport(ROWS, ROWS // 2)


def test_row_with_a_nan_error_keeps_the_codes_of_search(tmp_path: Path, monkeypatch) -> None:
    rows, statistics = random_rows(256), make_statistics(correlated_moments(256), tmp_path)

    def nan_errors(errors: np.ndarray, *_: object) -> np.ndarray:
        return np.full(errors.shape[1], np.nan, np.float32)  # of the codes of search

    monkeypatch.setattr(gptq, "output_errors", nan_errors)
    np.testing.assert_array_equal(
        encode("gptq", "Q4_K", rows, statistics), encode("search", "Q4_K", rows, statistics)
    )


@pytest.mark.parametrize("type", ["Q2_K", "Q3_K", "Q4_K", "Q4_0", "Q5_1"])
def test_errors_of_feedback_are_those_of_its_blocks(type: str, tmp_path: Path, monkeypatch) -> None:
    moments, rows = correlated_moments(512), random_rows(512)
    factor = factor_moments(moments.astype(np.float32), array_backends.array_backend())
    reported: list[np.ndarray] = []
    round_with_feedback = gptq.round_with_feedback

    def keep_errors(*args: Any) -> Any:
        result = round_with_feedback(*args)
        reported.append(result[2][:ROWS])
        return result

    monkeypatch.setattr(gptq, "round_with_feedback", keep_errors)
    blocks = encode("gptq", type, rows, make_statistics(moments, tmp_path))
    decoded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type]).astype(np.float64)
    errors = decoded - rows
    np.testing.assert_allclose(reported[0], ((errors @ factor.moments) * errors).sum(1), rtol=1e-3)


def test_a_limit_ends_the_sum_of_output_errors_early() -> None:
    moments = correlated_moments(512)
    factor = factor_moments(moments.astype(np.float32), array_backends.array_backend())
    errors = random_rows(512).T
    exact = (errors * (factor.moments @ errors)).sum(0)
    infinite = np.full(ROWS, np.inf, np.float32)
    np.testing.assert_allclose(output_errors(errors, factor, 32, infinite), exact, rtol=1e-3)
    limit = (0.1 * exact).astype(np.float32)
    early = output_errors(errors, factor, 32, limit)
    assert (early > limit).all() and (early < 0.9 * exact).any()
    limit[3] = 2 * exact[3]  # a single row below its limit needs all columns
    np.testing.assert_allclose(output_errors(errors, factor, 32, limit), exact, rtol=1e-3)


def test_value_weights_require_moments_of_attention_mixed_rows() -> None:
    for mixed in (True, False):
        statistics = InputStatistics(
            "blk.0.attn_v.weight",
            256,
            ROWS,
            1,
            None,
            FixedMoments(correlated_moments(256)[None], mixed),
        )
        assert METHODS["gptq"].can_encode(FORMATS["Q4_K"], statistics) is mixed
        # The graph of MLA applies attn_v_b to rows that attention has already mixed.
        for name, expected in (("attn_kv_b", mixed), ("attn_v_b", True)):
            statistics = replace(statistics, name=f"blk.0.{name}.weight")
            assert METHODS["gptq"].can_encode(FORMATS["Q4_K"], statistics) is expected, name


def test_value_rows_of_a_fused_weight_are_left_to_search(tmp_path: Path) -> None:
    rows, heads, keys = 40, 3, 1
    facts = file_types.ModelFacts("phi3", 1, heads, keys, 0)
    values = tensor_types.value_rows("blk.0.attn_qkv.weight", rows, facts)
    assert values == 8
    assert tensor_types.value_rows("blk.0.attn_q.weight", rows, facts) == 0
    assert tensor_types.value_rows("blk.0.attn_qkv.weight", rows + 1, facts) == 0
    statistics = replace(
        make_statistics(correlated_moments(256), tmp_path, rows),
        name="blk.0.attn_qkv.weight",
        value_rows=values,
    )
    floats = random_rows(256, rows)
    fused, without_value_rows = (
        encode("gptq", "Q4_K", floats, inputs)
        for inputs in (statistics, replace(statistics, value_rows=0))
    )
    searched = encode("search", "Q4_K", floats, statistics)
    np.testing.assert_array_equal(fused[:-values], without_value_rows[:-values])
    np.testing.assert_array_equal(fused[-values:], searched[-values:])
    assert (without_value_rows[-values:] != searched[-values:]).any()
    assert METHODS["gptq"].can_encode(FORMATS["Q4_K"], statistics)
    assert not METHODS["gptq"].can_encode(FORMATS["Q4_K"], replace(statistics, value_rows=0))
    solve = METHODS["gptq"].make_encoder(FORMATS["Q4_K"], statistics)
    spans = [solve(floats[first:last], first) for first, last in pairwise((0, 20, 33, 40))]
    np.testing.assert_array_equal(np.concatenate(spans), fused)


def test_q8_0_is_left_to_search(tmp_path: Path) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    plan = plan_quantization(
        source,
        "Q8_0",
        method="gptq",
        moments=load_moments(write_moments_of(source, tmp_path / "m.gguf")),
    )
    assert list(plan.methods) == ["search"]


def test_report_has_rows_and_damping(tmp_path: Path) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    moments = load_moments(write_moments_of(source, tmp_path / "m.gguf", ("blk.0.ffn_up.weight",)))
    plan = plan_quantization(source, "Q4_K_M", method="gptq", moments=moments)
    reports = write.write_model(plan, tmp_path / "o.gguf").method_reports
    assert reports.keys() == {step.weight.name for step in plan.methods["gptq"]}
    assert {name for name, report in reports.items() if report.damping} == {"blk.0.ffn_up.weight"}


def test_panels_are_multiples_of_the_row_count_and_nearly_full() -> None:
    for rows in (1, 63, 64, 576, 1024, 1025, 1536, 49152, 128256):
        assert (
            step := panel_rows(InputStatistics("", 576, rows))
        ) % PANEL_ROW_MULTIPLE == 0 and step <= PANEL_ROWS
        assert -(-rows // step) * step - rows < PANEL_ROW_MULTIPLE * -(-rows // PANEL_ROWS)


@pytest.mark.parametrize("problem", ["dead channels", "little text", "nothing", "one input"])
def test_singular_moments_reduce_the_error(problem: str, tmp_path: Path) -> None:
    moments, rows = correlated_moments(256), random_rows(256)
    if problem == "dead channels":
        moments[::5], moments[:, ::5] = 0, 0
    elif problem == "little text":
        moments = correlated_moments(256, tokens=40)
    elif problem == "nothing":
        moments[:] = 0
    else:
        moments[:] = 1
    statistics = make_statistics(moments, tmp_path)
    blocks = encode("gptq", "Q4_K", rows, statistics)
    decoded = ggml.decode(blocks, "Q4_K", 256, label="made")
    rounded = ggml.decode(ggml.encode(rows, "Q4_K", label="ggml"), "Q4_K", 256, label="ggml")
    assert np.isfinite(decoded).all()
    assert output_error(blocks, "Q4_K", rows, moments) <= output_error(
        encode("ggml", "Q4_K", rows, statistics), "Q4_K", rows, moments
    )
    # Columns without moments are still rounded to near values.
    if problem in ("dead channels", "nothing"):
        error, rounding_error = (
            np.square(values[:, ::5] - rows[:, ::5]).sum() for values in (decoded, rounded)
        )
        assert error < 2 * rounding_error


def test_matrix_that_is_not_positive_definite_gets_more_damping() -> None:
    assert (
        factor_moments(
            correlated_moments(64).astype(np.float32), array_backends.array_backend()
        ).damping
        == DAMPING
    )
    assert (
        factor_moments(
            (correlated_moments(64) - 0.1 * np.eye(64)).astype(np.float32),
            array_backends.array_backend(),
        ).damping
        > DAMPING
    )


def test_factor_reproduces_the_damped_moments() -> None:
    moments = correlated_moments(96).astype(np.float32)
    factor = factor_moments(moments, array_backends.array_backend())
    damped = moments + DAMPING * moments.diagonal().mean() * np.eye(96)
    upper = factor.feed.T.astype(np.float64) + np.eye(96)
    np.testing.assert_allclose((upper * factor.weights) @ upper.T, damped, rtol=1e-4, atol=1e-5)


def test_an_input_is_factored_once_for_all_its_weights_and_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    factor = gptq.factor_moments

    def count(*arguments: Any) -> Any:
        counted.append(1)
        return factor(*arguments)

    monkeypatch.setattr(gptq, "factor_moments", count)
    statistics = make_statistics(correlated_moments(256), tmp_path)
    rows = random_rows(256)
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        for kind in ("Q3_K", "Q4_K", "Q6_K"):
            encode("gptq", kind, rows, replace(statistics, name=name))
    assert len(counted) == 1
    encode("gptq", "Q4_K", rows, make_statistics(correlated_moments(256, seed=5), tmp_path))
    assert len(counted) == 2
    METHODS["gptq"].free_memory()
    encode("gptq", "Q4_K", rows, statistics)
    assert len(counted) == 3


def test_each_expert_uses_its_own_moments(tmp_path: Path) -> None:
    moments = np.stack([correlated_moments(256, seed=seed) for seed in (3, 4)])
    rows, statistics = random_rows(256, 2 * ROWS), make_statistics(moments, tmp_path)
    blocks = encode("gptq", "Q4_K", rows, statistics)
    for number in (0, 1):
        expert_rows = slice(number * ROWS, (number + 1) * ROWS)
        expected = encode(
            "gptq", "Q4_K", rows[expert_rows], make_statistics(moments[number], tmp_path)
        )
        np.testing.assert_array_equal(blocks[expert_rows], expected)


def write_moments_of(source: write.Source, out: Path, not_positive: tuple[str, ...] = ()) -> Path:
    """Write moments of all matrices of a model to `out`, and return `out`.

    The moments of the tensors in `not_positive` are not positive definite.
    """
    zeros, count = np.zeros, np.full(1, 1200.0)

    def moments(weight: write.Weight) -> np.ndarray:
        positive = correlated_moments(weight.columns)
        return (
            positive
            if weight.name not in not_positive
            else 2 * positive - np.diag(positive.diagonal())
        )

    inputs = [
        (
            (weight.name,),
            MomentSums.from_matrices(
                moments(weight)[None] * 1200, zeros((1, weight.columns)), count
            ),
        )
        for weight in source.weights
        if len(weight.shape) == 2 and weight.name != "token_embd.weight"
    ]
    return write_moments(out, inputs)


def test_file_does_not_depend_on_threads_and_its_settings_have_the_moments_digest(
    tmp_path: Path,
) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    moments = load_moments(write_moments_of(source, tmp_path / "m.gguf"))
    plan = plan_quantization(source, "Q4_K_M", method="gptq", moments=moments)
    assert {step.weight.name for step in plan.methods["gptq"]} >= {
        "blk.0.ffn_down.weight",
        "blk.0.attn_q.weight",
    }
    assert "token_embd.weight" not in {step.weight.name for step in plan.methods["gptq"]}
    single_threaded, multi_threaded = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write.write_model(plan, single_threaded, threads=1)
    write.write_model(plan, multi_threaded, threads=3)
    assert single_threaded.read_bytes() == multi_threaded.read_bytes()
    assert moments.digest in plan.settings
    assert plan_quantization(source, "Q4_K_M", moments=moments).settings != plan.settings


def test_nan_moments_are_refused(tmp_path: Path) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    moments = load_moments(write_moments_of(source, tmp_path / "m.gguf"))
    second = moments.input_of("blk.0.attn_q.weight")
    assert second is not None
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.seek(second.offset + 4)
        file.write(np.array([np.nan], "<f4").tobytes())
    with pytest.raises(UserError, match=r"attn_q.*not finite"):
        write.write_model(
            plan_quantization(source, "Q4_K_M", method="gptq", moments=moments),
            tmp_path / "o.gguf",
        )


@pytest.mark.parametrize("type", ["Q2_K", "Q3_K", "Q4_1"])
def test_torch_error_equals_that_of_numpy(
    type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    moments, rows = correlated_moments(256), random_rows(256)
    statistics = make_statistics(moments, tmp_path)
    numpy_error = output_error(encode("gptq", type, rows, statistics), type, rows, moments)
    monkeypatch.setattr(array_backends, "device", lambda: "cpu")
    torch_error = output_error(encode("gptq", type, rows, statistics), type, rows, moments)
    assert abs(torch_error / numpy_error - 1) < 0.03


def test_gptq_works_without_torch_and_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments, rows = correlated_moments(256), random_rows(256)
    statistics = make_statistics(moments, tmp_path)
    errors = [output_error(encode("gptq", "Q4_K", rows, statistics), "Q4_K", rows, moments)]
    monkeypatch.setattr(array_backends.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ggml, "c_function", lambda *_: None)
    errors.append(output_error(encode("gptq", "Q4_K", rows, statistics), "Q4_K", rows, moments))
    assert abs(errors[1] / errors[0] - 1) < 0.03
