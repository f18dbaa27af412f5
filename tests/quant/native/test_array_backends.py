"""Torch backends: no operation mixes two devices, and a full device gets smaller batches."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.calibration import moments_collector
from quant.calibration.triangle import Triangle, triangle_size, whole_matrix
from quant.errors import UserError
from quant.formats import FORMATS
from quant.methods import METHODS, error_feedback
from quant.methods.column_grids import ColumnFormat
from quant.methods.gptq import PANEL_ROW_MULTIPLE
from quant.methods.hessian_factor import DAMPING, factor_moments
from quant.methods.search import search_fields
from quant.methods.search_settings import SEARCH_SETTINGS
from quant.native import array_backends, ggml
from quant.native.array_backends import DeviceOutOfMemory, NumpyBackend, TorchBackend
from tests.quant.methods.test_gptq import (
    correlated_moments,
    encode,
    make_statistics,
    output_error,
    random_rows,
)

torch = pytest.importorskip("torch")
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB"
)


class MetaDevice(TorchBackend):
    """A backend on torch's meta device, whose arrays have a shape and no values.

    torch raises an error if an operation also has an array on the CPU.
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self.without_warnings: Any = nullcontext

    def to_numpy(self, values: Any) -> Any:
        assert values.device.type == "meta"
        return np.zeros(tuple(values.shape), bool if values.dtype == torch.bool else np.float32)


class LimitedBackend(TorchBackend):
    """A device that runs out of memory for arrays of more than `room` values.

    `shapes` records the shapes of all requested arrays.
    """

    def __init__(self, room: int) -> None:
        super().__init__("cpu")
        self.room, self.shapes = room, list[tuple[int, ...]]()

    def array(self, values: Any) -> Any:
        self._fits(values.shape)
        return super().array(values)

    def zeros(self, *shape: int) -> Any:
        self._fits(shape)
        return super().zeros(*shape)

    def _fits(self, shape: tuple[int, ...]) -> None:
        self.shapes.append(tuple(shape))
        if np.prod(shape) > self.room:
            raise RuntimeError(OUT_OF_MEMORY)


SetBackend = Callable[[TorchBackend], TorchBackend]


@pytest.fixture
def set_backend(monkeypatch: pytest.MonkeyPatch) -> SetBackend:
    """A function that makes a backend the one of all further computations, and returns it."""

    def install(ops: TorchBackend) -> TorchBackend:
        monkeypatch.setattr(array_backends, "device", lambda: ops.device.type)
        monkeypatch.setattr(array_backends, "array_backend", lambda device=None: ops)
        return ops

    return install


def test_meta_device_refuses_arrays_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        MetaDevice().zeros(3) + torch.ones(3)


@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_a_search_stays_on_its_device(type: str) -> None:
    fields = search_fields(
        random_rows(512),
        None,
        FORMATS[type],
        SEARCH_SETTINGS[type],
        MetaDevice(),
        SEARCH_SETTINGS[type].native_effort,
    )
    assert fields.codes.shape == (
        32 * 512 // SEARCH_SETTINGS[type].block_values,
        SEARCH_SETTINGS[type].block_values,
    )


@pytest.mark.parametrize("type", ["Q4_0", "Q5_1", "Q3_K", "Q4_K"])  # each kind of block
def test_error_feedback_stays_on_its_device(type: str) -> None:
    ops, size = MetaDevice(), ggml.block_size(type).values
    factor = factor_moments(correlated_moments(2 * size).astype(np.float32), ops)
    _, levels, errors = error_feedback.round_with_feedback(
        ColumnFormat.from_format(FORMATS[type]),
        ops.zeros(2 * size, PANEL_ROW_MULTIPLE),
        factor,
        2,
        ops,
    )
    assert levels.device == errors.device == ops.device
    assert levels.shape == (2 * size, PANEL_ROW_MULTIPLE)


def test_products_stay_on_their_device(set_backend: SetBackend) -> None:
    set_backend(MetaDevice())
    rows = np.ones((8, 600), np.float32)
    sums = np.zeros(triangle_size(600))
    moments_collector._add_triangle(Triangle(sums, 600), rows, rows)
    assert not sums.any()  # the meta device has no values, so the product was not made on the CPU


def test_torch_factor_equals_numpy() -> None:
    moments = correlated_moments(96).astype(np.float32)
    numpy_factor, torch_factor = (
        factor_moments(moments, ops) for ops in (NumpyBackend(), TorchBackend("cpu"))
    )
    assert numpy_factor.damping == torch_factor.damping == DAMPING
    for name in ("moments", "feed", "weights"):
        np.testing.assert_allclose(
            getattr(numpy_factor, name), getattr(torch_factor, name).numpy(), rtol=1e-5, atol=1e-7
        )
    assert not np.triu(torch_factor.feed.numpy()).any()


def test_torch_damps_a_matrix_that_is_not_positive_definite() -> None:
    not_positive = (correlated_moments(64) - 0.1 * np.eye(64)).astype(np.float32)
    assert (
        factor_moments(not_positive, TorchBackend("cpu")).damping
        == factor_moments(not_positive, NumpyBackend()).damping
        > DAMPING
    )


def test_factor_is_computed_on_the_cpu_if_the_device_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError(OUT_OF_MEMORY)

    moments, ops = correlated_moments(96).astype(np.float32), TorchBackend("cpu")
    monkeypatch.setattr(ops, "_udu", full)
    np.testing.assert_array_equal(
        factor_moments(moments, ops).feed.numpy(), factor_moments(moments, NumpyBackend()).feed
    )


def test_only_out_of_memory_errors_are_converted() -> None:
    ops = TorchBackend("cpu")
    with pytest.raises(DeviceOutOfMemory), ops.exclusive_access():
        raise RuntimeError(OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="illegal memory access"), ops.exclusive_access():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with ops.exclusive_access():  # both errors have released the lock
        pass


@pytest.mark.parametrize("type", ["Q4_K", "Q5_1"])
def test_search_splits_its_rows_on_a_full_device(
    type: str, tmp_path: Path, set_backend: SetBackend
) -> None:
    moments, rows = correlated_moments(256), random_rows(256, 64)
    statistics = make_statistics(moments, tmp_path, len(rows))
    set_backend(TorchBackend("cpu"))
    expected = encode("search", type, rows, statistics)
    backend = set_backend(LimitedBackend(16 * 256))
    limited = encode("search", type, rows, statistics)
    assert output_error(limited, type, rows, moments) == pytest.approx(
        output_error(expected, type, rows, moments), rel=1e-3
    )
    assert max(map(np.prod, backend.shapes)) == rows.size


def test_gptq_narrows_its_panels_on_a_full_device(tmp_path: Path, set_backend: SetBackend) -> None:
    moments, rows = correlated_moments(256), random_rows(256, 4 * PANEL_ROW_MULTIPLE)
    statistics = make_statistics(moments, tmp_path, len(rows))
    set_backend(TorchBackend("cpu"))
    expected = output_error(encode("gptq", "Q4_K", rows, statistics), "Q4_K", rows, moments)
    backend = set_backend(LimitedBackend(256 * 256))
    both_statistics = make_statistics(moments, tmp_path, 2 * len(rows))
    narrow = encode("gptq", "Q4_K", np.tile(rows, (2, 1)), both_statistics)[: len(rows)]
    assert {(256, 8 * PANEL_ROW_MULTIPLE), (256, 4 * PANEL_ROW_MULTIPLE)} <= set(backend.shapes)
    assert output_error(narrow, "Q4_K", rows, moments) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "room", "step"),
    [
        ("search", 0, "for blk.0.ffn_up.weight"),
        ("gptq", 256 * PANEL_ROW_MULTIPLE, "for the second moments of blk.0.ffn_up.weight"),
    ],
)
def test_device_without_any_memory_is_reported(
    method: str, room: int, step: str, tmp_path: Path, set_backend: SetBackend
) -> None:
    set_backend(LimitedBackend(room))
    with pytest.raises(UserError, match=f"the GPU has no memory left {step}") as caught:
        encode(method, "Q4_K", random_rows(256), make_statistics(correlated_moments(256), tmp_path))
    assert "CUDA_VISIBLE_DEVICES=" in str(caught.value.hint)


def test_products_are_computed_on_the_cpu_if_the_device_is_full(set_backend: SetBackend) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 600)).astype(np.float32)

    def summed() -> np.ndarray:
        triangle = Triangle(np.zeros(triangle_size(600)), 600)
        moments_collector._add_triangle(triangle, rows, rows)
        return whole_matrix(triangle.read_stripes(), 600)

    plain = summed()
    set_backend(LimitedBackend(0))
    np.testing.assert_array_equal(summed(), plain)
    set_backend(TorchBackend("cpu"))
    np.testing.assert_allclose(summed(), plain, rtol=1e-5, atol=1e-5)
    assert plain == pytest.approx(rows.T.astype(np.float64) @ rows, abs=1e-4)


def test_methods_with_array_backends_are_tested_here() -> None:
    assert {name for name, method in METHODS.items() if method.backend_name()} == {"search", "gptq"}
