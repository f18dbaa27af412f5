"""The trial of products measures both layouts, decides by their times, and is kept for equal
conditions.
"""

import json
from pathlib import Path

import pytest

from llmcli.config import Config, load_config
from llmcli.errors import UserError
from llmcli.planning.measurements import product_trial
from llmcli.planning.measurements.product_trial import ProductTimes, choose_products
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from quant.model_file.read_header import read_header
from quant.quantize import plan, write
from tests.quant import tiny_gguf

OWN_FASTER, GGML_FASTER = ProductTimes(1.0, 1.2), ProductTimes(1.0, 0.8)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config({"LLMCLI_HOME": str(tmp_path / "home")})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    source = tiny_gguf.llama(tmp_path / "f32.gguf", hidden=256, layers=2)
    out = tmp_path / "q4_k_m.gguf"
    write.write_model(plan.plan_quantization(write.open_gguf(source), "Q4_K_M"), out, threads=1)
    return out


@pytest.fixture(autouse=True)
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_available", lambda: True)


def measure_as(monkeypatch: pytest.MonkeyPatch, times: dict[str, ProductTimes]) -> list[str]:
    """Let measurements have these results. Return the list of the types that are measured."""
    measured: list[str] = []

    def measure(name: str, threads: int) -> tuple[ProductTimes, bool]:
        measured.append(name)
        return times[name], True

    monkeypatch.setattr(product_trial, "measure_products", measure)
    return measured


def test_types_that_ggml_multiplies_faster_are_left_to_it_and_measured_once(
    path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_trial, "MIN_BYTES", 0)
    measured = measure_as(monkeypatch, {"Q4_K": OWN_FASTER, "Q6_K": GGML_FASTER})
    for _ in range(2):
        assert choose_products(read_header(path), ON_HOST, 2, config) == ("Q6_K",)
    assert sorted(measured) == ["Q4_K", "Q6_K"]
    choose_products(read_header(path), ON_HOST, 1, config)  # another number of threads
    assert len(measured) == 4


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 2, "own_seconds": 1.0, "ggml_seconds": 0.1}', "[1]"]
)
def test_a_damaged_result_is_measured_again(
    path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(product_trial, "MIN_BYTES", 0)
    measured = measure_as(monkeypatch, {"Q4_K": OWN_FASTER, "Q6_K": OWN_FASTER})
    saved = product_trial.cache_path("Q4_K", 2, config)
    saved.parent.mkdir(parents=True)
    saved.write_text(text)
    assert choose_products(read_header(path), ON_HOST, 2, config) == ()
    assert "Q4_K" in measured
    assert json.loads(saved.read_text())["own_seconds"] == 1.0


@pytest.mark.parametrize(("ggml_seconds", "count"), [(1.1, 2), (1.3, 1), (0.7, 1)])
def test_beside_other_programs_only_a_clear_result_is_kept(
    config: Config, monkeypatch: pytest.MonkeyPatch, ggml_seconds: float, count: int
) -> None:
    rounds: list[int] = []

    def time_in_turns(tasks: object, count: int) -> list[list[float]]:
        rounds.append(count)
        return [
            [seconds, 2 * seconds, 2 * seconds] for seconds in (1, 1, ggml_seconds, ggml_seconds)
        ]

    monkeypatch.setattr(product_trial, "make_product", lambda *args, own: lambda number: None)
    monkeypatch.setattr(product_trial, "_bfloat16_product", lambda *args: lambda number: None)
    monkeypatch.setattr(product_trial, "time_in_turns", time_in_turns)
    for _ in range(2):
        product_trial.types_of_ggml(["Q4_K"], 2, config)
    assert len(rounds) == count


@pytest.mark.parametrize("error", [UserError("there is no memory for weights"), MemoryError()])
def test_without_memory_to_measure_own_products_are_used(
    path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str, threads: int) -> tuple[ProductTimes, bool]:
        raise error

    monkeypatch.setattr(product_trial, "MIN_BYTES", 0)
    monkeypatch.setattr(product_trial, "measure_products", fail)
    assert choose_products(read_header(path), ON_HOST, 2, config) == ()


def test_small_models_and_ggmls_products_are_not_measured(
    path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure_as(monkeypatch, {})
    assert choose_products(read_header(path), ON_HOST, 2, config) == ()
    monkeypatch.setattr(product_trial, "MIN_BYTES", 0)
    for changes in ({"ggml_products": True}, {"repack": False}):
        placement = type(ON_HOST)(0, **changes)
        assert choose_products(read_header(path), placement, 2, config) == ()
    assert not measured


@pytest.mark.parametrize("name", products.TYPES)
def test_every_type_can_be_measured(name: str) -> None:
    if products.repack_buffer_type() is None:
        pytest.skip(products.unusable_reason())
    times, _ = product_trial.measure_products(name, 1)
    assert times.own_seconds > 0
    assert times.ggml_seconds > 0
