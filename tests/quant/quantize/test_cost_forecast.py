"""The forecast of an encoding's time and memory."""

from pathlib import Path

import numpy as np
import pytest

from quant.calibration.expected_moments import ExpectedMoments
from quant.calibration.moments import load_moments
from quant.calibration.moments_writer import MomentSums, write_moments
from quant.quantize import cost_forecast, pipeline
from quant.quantize.cost_forecast import PowerCurve
from quant.quantize.plan import Plan, plan_quantization
from quant.quantize.write import open_gguf
from tests.quant import tiny_gguf

HIDDEN, FFN, LAYERS = 256, 512, 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(
        tmp_path / "m.gguf", hidden=HIDDEN, ff=FFN, layers=LAYERS, vocab=300, tied=True
    )


def write_random_moments(path: Path) -> Path:
    """Write second moments of the inputs of a layer's q and k, gate and up, and down."""
    inputs = []
    for block in range(LAYERS):
        for roles, columns in (
            (("attn_q", "attn_k"), HIDDEN),
            (("ffn_gate", "ffn_up"), HIDDEN),
            (("ffn_down",), FFN),
        ):
            names = tuple(f"blk.{block}.{role}.weight" for role in roles)
            matrix = (np.eye(columns) + 0.5)[None] * 5000
            sums = MomentSums.from_matrices(matrix, np.zeros((1, columns)), np.full(1, 5000.0))
            inputs.append((names, sums))
    return write_moments(path, inputs)


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Plan:
    moments = load_moments(write_random_moments(tmp_path / "moments.gguf"))
    return plan_quantization(open_gguf(model), "Q4_K_M", method="gptq", moments=moments)


def test_shared_moments_are_factored_once(plan: Plan) -> None:
    solved = [step for step in plan.steps if step.method and step.method.name == "gptq"]
    assert len(solved) == 5 * LAYERS
    columns = cost_forecast.factored_columns(solved)
    assert sorted(columns) == sorted([HIDDEN, HIDDEN, FFN] * LAYERS)
    expected = plan_quantization(plan.source, "Q4_K_M", method="gptq", expected=ExpectedMoments())
    layer_inputs = {
        step.weight.name: step
        for step in expected.steps
        if step.weight.name in {weight.weight.name for weight in solved}
    }
    assert cost_forecast.factored_columns(layer_inputs.values()) == columns


def test_wider_tensors_follow_from_two_widths() -> None:
    widths = (1024, 2048)
    curve = PowerCurve.through(1, widths, [3 * n + 0.01 * n**2 for n in widths])
    assert curve.seconds(14336) == pytest.approx(3 * 14336 + 0.01 * 14336**2)
    cubic = PowerCurve.through(2, widths, [0.5 * n**3 for n in widths])
    assert cubic.seconds(1000) == pytest.approx(0.5e9)
    # the first measurement was disturbed: the term that would be negative is left out
    assert PowerCurve.through(1, (100, 200), [9e9, 200**2]).seconds(1000) == pytest.approx(1e6)


def test_the_forecast_adds_factors_panels_and_other_values(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, factor = PowerCurve(1, 2.0, 0.0), PowerCurve(2, 3.0, 0.0)
    monkeypatch.setattr(cost_forecast, "_row_time", lambda kind: row)
    monkeypatch.setattr(cost_forecast, "_factor_time", lambda: factor)
    monkeypatch.setattr(cost_forecast, "_seconds_per_value", lambda method, kind: 5.0)
    forecast = cost_forecast.forecast_cost(plan.steps, threads=1)
    factors = LAYERS * 3.0 * (2 * HIDDEN**2 + FFN**2)
    weights = {step.weight.name: step.weight for step in plan.steps}
    solved = sum(
        2.0 * weights[name].elements
        for name in weights
        if any(role in name for role in ("attn_q.", "attn_k.", "ffn_")) and "norm" not in name
    )
    others = sum(
        5.0 * step.weight.elements
        for step in plan.steps
        if step.method and step.method.name != "gptq"
    )
    assert forecast.factor_seconds == pytest.approx(factors)
    assert forecast.seconds == pytest.approx(factors + solved + others)
    assert forecast.memory_bytes > pipeline.MAX_BUFFERED_BYTES


def test_memory_is_that_of_the_factors_and_of_a_further_one_or_the_panels(plan: Plan) -> None:
    solved = [step for step in plan.steps if step.method and step.method.name == "gptq"]
    mebi = 1 << 20
    # 6 bytes for each value of a factor, 10 for one in the making; panels of 7 floats a value
    panel = 4 * 7 * FFN * 256
    assert cost_forecast.solver_bytes(solved, [1024, 512, 1024], 0) == (6 + 10) * mebi
    assert cost_forecast.solver_bytes(solved, [1024], 1) == max(10 * mebi, 6 * mebi + panel)
    assert cost_forecast.solver_bytes(solved, [FFN], 8) == 6 * FFN**2 + 8 * panel
    assert cost_forecast.solver_bytes([], [], 8) == 0


@pytest.mark.parametrize(
    ("method", "kind"), [("gptq", "Q4_K"), ("search", "Q6_K"), ("ggml", "IQ2_XXS")]
)
def test_trials_need_no_weights_and_no_statistics(method: str, kind: str) -> None:
    assert cost_forecast._trial_seconds(method, kind, 2, 256) > 0


def test_only_long_work_is_forecast(plan: Plan) -> None:
    assert not cost_forecast.is_worth_forecasting(plan.steps)
