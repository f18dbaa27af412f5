"""Error feedback reduces a layer's output error, for every kind of moments, in the stock formats."""

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

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
from quant.methods.gptq import PANEL_ROW_MULTIPLE, PANEL_ROWS, panel_rows
from quant.methods.hessian_factor import DAMPING, factor_moments
from quant.native import array_backends, ggml
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from quant.recipes import file_types, tensor_types
from tests.quant import tiny_gguf

KS, FLAT = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ROWS = 32


@dataclass(frozen=True)
class Known:
    """Second moments from memory."""

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
def _correlated(columns: int, texts: int, seed: int) -> np.ndarray:
    """Moments of inputs that lie mostly in a few directions, some channels much louder than others."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(columns, columns)))
    inputs = (rng.normal(size=(texts, columns)) * np.arange(1, columns + 1) ** -0.4) @ basis.T
    inputs[:, ::97] *= 5
    return inputs.T @ inputs / texts


def correlated(columns: int, texts: int = 1200, seed: int = 0) -> np.ndarray:
    return _correlated(columns, texts, seed).copy()


def evidence(moments: np.ndarray, folder: Path, rows: int = ROWS) -> InputStatistics:
    moments = moments.reshape(-1, *moments.shape[-2:])
    file = folder / "sums"
    squares = moments.diagonal(axis1=1, axis2=2).astype("<f4")
    file.write_bytes(squares.tobytes())
    sums = ImatrixEntry(file, 0, squares.size, (1.0,) * len(moments))
    return InputStatistics(
        "blk.0.ffn_up.weight", moments.shape[-1], rows, len(moments), sums, Known(moments)
    )


def drawn(columns: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.02, (rows, columns)).astype(np.float32)


def made(method: str, type: str, rows: np.ndarray, known: InputStatistics) -> np.ndarray:
    return METHODS[method].make_encoder(FORMATS[type], known)(rows, 0)


def lost(blocks: np.ndarray, type: str, rows: np.ndarray, moments: np.ndarray) -> float:
    """The error of all rows in the layer's output, from what the gguf package reads."""
    off = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type]).astype(np.float64) - rows
    return float(((off @ moments) * off).sum())


@pytest.mark.parametrize(
    ("type", "columns"), [(type, 512) for type in KS] + [(type, 576) for type in FLAT]
)
def test_a_layers_output_is_nearer_than_by_a_search_with_an_imatrix(
    type: str, columns: int, tmp_path: Path
) -> None:
    moments, rows = correlated(columns), drawn(columns)
    known = evidence(moments, tmp_path)
    off = {
        name: lost(made(name, type, rows, known), type, rows, moments)
        for name in ("ggml", "search", "gptq")
    }
    assert off["gptq"] < 0.8 * min(off["ggml"], off["search"])


@pytest.mark.parametrize("type", ["Q4_K", "Q8_0"])
def test_a_row_gets_the_same_bytes_wherever_it_stands(
    type: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(gptq, "PANEL_ROWS", 64)
    known = evidence(correlated(256), tmp_path, rows=150)
    rows, solve = drawn(256, 150), METHODS["gptq"].make_encoder(FORMATS[type], known)
    whole = solve(rows, 0)
    cuts = (0, 1, 20, 100, 149, 150)
    parts = [solve(rows[first:last], first) for first, last in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_row_that_is_no_better_keeps_the_codes_of_search(tmp_path: Path, monkeypatch) -> None:
    moments, rows = correlated(256), drawn(256)
    known, feed = evidence(moments, tmp_path), gptq.round_with_feedback

    def spoiled(*args: object) -> tuple[list, object]:
        """Error feedback that gets every second row wrong."""
        grids, levels = feed(*args)
        levels[:, ::2] = 0
        return grids, levels

    sound = made("gptq", "Q4_K", rows, known)
    monkeypatch.setattr(gptq, "round_with_feedback", spoiled)
    solve = METHODS["gptq"].make_encoder(FORMATS["Q4_K"], known)
    found = solve(rows, 0)
    np.testing.assert_array_equal(found[::2], made("search", "Q4_K", rows, known)[::2])
    np.testing.assert_array_equal(found[1::2], sound[1::2])
    assert METHODS["gptq"].report(solve) == MethodReport(ROWS, ROWS // 2)


def test_a_row_whose_error_is_no_number_keeps_the_codes_of_search(
    tmp_path: Path, monkeypatch
) -> None:
    rows, known = drawn(256), evidence(correlated(256), tmp_path)

    def unknown(off: np.ndarray, *_: object) -> np.ndarray:
        return np.full(off.shape[1], np.nan, np.float32)

    monkeypatch.setattr(gptq, "output_errors", unknown)
    np.testing.assert_array_equal(
        made("gptq", "Q4_K", rows, known), made("search", "Q4_K", rows, known)
    )


def test_values_want_the_moments_of_what_attention_mixes() -> None:
    for mixed in (True, False):
        known = InputStatistics(
            "blk.0.attn_v.weight", 256, ROWS, 1, None, Known(correlated(256)[None], mixed)
        )
        assert METHODS["gptq"].can_encode(FORMATS["Q4_K"], known) is mixed
        for name, wanted in (("attn_kv_b", mixed), ("attn_v_b", True)):  # MLA mixes first
            known = replace(known, name=f"blk.0.{name}.weight")
            assert METHODS["gptq"].can_encode(FORMATS["Q4_K"], known) is wanted, name


def test_of_fused_rows_all_but_the_values_are_solved(tmp_path: Path) -> None:
    rows, heads, keys = 40, 3, 1
    facts = file_types.ModelFacts("phi3", 1, heads, keys, 0)
    values = tensor_types.value_rows("blk.0.attn_qkv.weight", rows, facts)
    assert values == 8
    assert tensor_types.value_rows("blk.0.attn_q.weight", rows, facts) == 0
    assert tensor_types.value_rows("blk.0.attn_qkv.weight", rows + 1, facts) == 0
    known = replace(
        evidence(correlated(256), tmp_path, rows), name="blk.0.attn_qkv.weight", value_rows=values
    )
    floats = drawn(256, rows)
    found, plain = (
        made("gptq", "Q4_K", floats, one) for one in (known, replace(known, value_rows=0))
    )
    searched = made("search", "Q4_K", floats, known)
    np.testing.assert_array_equal(found[:-values], plain[:-values])
    np.testing.assert_array_equal(found[-values:], searched[-values:])
    assert (plain[-values:] != searched[-values:]).any()
    assert METHODS["gptq"].can_encode(FORMATS["Q4_K"], known)
    assert not METHODS["gptq"].can_encode(FORMATS["Q4_K"], replace(known, value_rows=0))
    solve = METHODS["gptq"].make_encoder(FORMATS["Q4_K"], known)
    parts = [solve(floats[first:last], first) for first, last in pairwise((0, 20, 33, 40))]
    np.testing.assert_array_equal(np.concatenate(parts), found)


def test_eight_bits_are_left_to_search(tmp_path: Path) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    plan = plan_quantization(
        source, "Q8_0", method="gptq", moments=load_moments(measured(source, tmp_path / "m.gguf"))
    )
    assert list(plan.methods) == ["search"]


def test_a_file_s_report_tells_of_rows_and_of_damping(tmp_path: Path) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    moments = load_moments(measured(source, tmp_path / "m.gguf", ("blk.0.ffn_up.weight",)))
    plan = plan_quantization(source, "Q4_K_M", method="gptq", moments=moments)
    remarks = write.write_model(plan, tmp_path / "o.gguf").method_reports
    assert remarks.keys() == {step.weight.name for step in plan.methods["gptq"]}
    assert {name for name, one in remarks.items() if one.damping} == {"blk.0.ffn_up.weight"}


def test_a_panel_is_whole_lanes_and_hardly_empty() -> None:
    for rows in (1, 63, 64, 576, 1024, 1025, 1536, 49152, 128256):
        assert (
            step := panel_rows(InputStatistics("", 576, rows))
        ) % PANEL_ROW_MULTIPLE == 0 and step <= PANEL_ROWS
        assert -(-rows // step) * step - rows < PANEL_ROW_MULTIPLE * -(-rows // PANEL_ROWS)


@pytest.mark.parametrize("what", ["dead channels", "little text", "nothing", "one input"])
def test_moments_without_an_inverse_still_steer(what: str, tmp_path: Path) -> None:
    moments, rows = correlated(256), drawn(256)
    if what == "dead channels":
        moments[::5], moments[:, ::5] = 0, 0
    elif what == "little text":
        moments = correlated(256, texts=40)
    elif what == "nothing":
        moments[:] = 0
    else:
        moments[:] = 1
    known = evidence(moments, tmp_path)
    blocks = made("gptq", "Q4_K", rows, known)
    found = ggml.decode(blocks, "Q4_K", 256, label="made")
    plain = ggml.decode(ggml.encode(rows, "Q4_K", label="ggml"), "Q4_K", 256, label="ggml")
    assert np.isfinite(found).all()
    assert lost(blocks, "Q4_K", rows, moments) <= lost(
        made("ggml", "Q4_K", rows, known), "Q4_K", rows, moments
    )
    if what in ("dead channels", "nothing"):  # what nothing is known of is rounded, not given up
        off, theirs = (np.square(one[:, ::5] - rows[:, ::5]).sum() for one in (found, plain))
        assert off < 2 * theirs


def test_a_matrix_that_is_not_positive_takes_more_damping() -> None:
    assert (
        factor_moments(correlated(64).astype(np.float32), array_backends.array_backend()).damping
        == DAMPING
    )
    assert (
        factor_moments(
            (correlated(64) - 0.1 * np.eye(64)).astype(np.float32), array_backends.array_backend()
        ).damping
        > DAMPING
    )


def test_the_factor_is_of_the_damped_moments() -> None:
    moments = correlated(96).astype(np.float32)
    made = factor_moments(moments, array_backends.array_backend())
    damped = moments + DAMPING * moments.diagonal().mean() * np.eye(96)
    upper = made.feed.T.astype(np.float64) + np.eye(96)
    np.testing.assert_allclose((upper * made.weights) @ upper.T, damped, rtol=1e-4, atol=1e-5)


def test_each_expert_is_rounded_by_its_own_moments(tmp_path: Path) -> None:
    moments = np.stack([correlated(256, seed=seed) for seed in (3, 4)])
    rows, known = drawn(256, 2 * ROWS), evidence(moments, tmp_path)
    blocks = made("gptq", "Q4_K", rows, known)
    for number in (0, 1):
        own = slice(number * ROWS, (number + 1) * ROWS)
        alone = made("gptq", "Q4_K", rows[own], evidence(moments[number], tmp_path))
        np.testing.assert_array_equal(blocks[own], alone)


def measured(source: write.Source, out: Path, unsound: tuple[str, ...] = ()) -> Path:
    """Moments of every matrix; those of the `unsound` are not positive."""
    none, count = np.zeros, np.full(1, 1200.0)

    def moments(weight: write.Weight) -> np.ndarray:
        found = correlated(weight.columns)
        return found if weight.name not in unsound else 2 * found - np.diag(found.diagonal())

    gathered = [
        ((weight.name,), MomentSums(moments(weight)[None] * 1200, none((1, weight.columns)), count))
        for weight in source.weights
        if len(weight.shape) == 2 and weight.name != "token_embd.weight"
    ]
    return write_moments(out, gathered)


def test_a_file_is_the_same_from_any_number_of_threads_and_names_its_moments(
    tmp_path: Path,
) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    moments = load_moments(measured(source, tmp_path / "m.gguf"))
    plan = plan_quantization(source, "Q4_K_M", method="gptq", moments=moments)
    assert {step.weight.name for step in plan.methods["gptq"]} >= {
        "blk.0.ffn_down.weight",
        "blk.0.attn_q.weight",
    }
    assert "token_embd.weight" not in {step.weight.name for step in plan.methods["gptq"]}
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write.write_model(plan, one, threads=1)
    write.write_model(plan, two, threads=3)
    assert one.read_bytes() == two.read_bytes()
    assert moments.digest in plan.settings
    assert plan_quantization(source, "Q4_K_M", moments=moments).settings != plan.settings


def test_moments_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    source = write.open_gguf(tiny_gguf.llama(tmp_path / "a.gguf", layers=1))
    moments = load_moments(measured(source, tmp_path / "m.gguf"))
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
def test_torch_computes_the_same_as_numpy(
    type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    moments, rows = correlated(256), drawn(256)
    known = evidence(moments, tmp_path)
    mine = lost(made("gptq", type, rows, known), type, rows, moments)
    monkeypatch.setattr(array_backends, "device", lambda: "cpu")
    theirs = lost(made("gptq", type, rows, known), type, rows, moments)
    assert abs(theirs / mine - 1) < 0.03


def test_it_needs_no_torch_and_no_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments, rows = correlated(256), drawn(256)
    known = evidence(moments, tmp_path)
    off = [lost(made("gptq", "Q4_K", rows, known), "Q4_K", rows, moments)]
    monkeypatch.setattr(array_backends.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ggml, "_c_function", lambda *_: None)
    off.append(lost(made("gptq", "Q4_K", rows, known), "Q4_K", rows, moments))
    assert abs(off[1] / off[0] - 1) < 0.03
