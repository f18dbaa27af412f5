"""A torch device: arrays of two devices never mix, and a full device gets smaller batches."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.calibration import moments_collector
from quant.errors import UserError
from quant.formats import FORMATS
from quant.methods import METHODS, error_feedback
from quant.methods.column_grids import ColumnFormat
from quant.methods.gptq import PANEL_ROW_MULTIPLE
from quant.methods.hessian_factor import DAMPING, factor_moments
from quant.methods.search import search_fields
from quant.methods.search_settings import SEARCH_SETTINGS
from quant.native import array_backends
from quant.native.array_backends import DeviceOutOfMemory, NumpyBackend, TorchBackend
from tests.quant.methods.test_gptq import correlated, drawn, evidence, lost, made

torch = pytest.importorskip("torch")
WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB"


class Elsewhere(TorchBackend):
    """A device of which no value is known, only where it is: torch refuses to join it to what lies
    on the CPU.
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self.without_warnings: Any = nullcontext

    def to_numpy(self, values: Any) -> Any:
        assert values.device.type == "meta"
        return np.zeros(tuple(values.shape), bool if values.dtype == torch.bool else np.float32)


class Small(TorchBackend):
    """A device that has room for so many values in an array."""

    def __init__(self, room: int) -> None:
        super().__init__("cpu")
        self.room, self.asked = room, list[tuple[int, ...]]()

    def array(self, values: Any) -> Any:
        self._fits(values.shape)
        return super().array(values)

    def zeros(self, *shape: int) -> Any:
        self._fits(shape)
        return super().zeros(*shape)

    def _fits(self, shape: tuple[int, ...]) -> None:
        self.asked.append(tuple(shape))
        if np.prod(shape) > self.room:
            raise RuntimeError(WORDS)


Use = Callable[[TorchBackend], TorchBackend]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Computes by such a device from now on."""

    def put(ops: TorchBackend) -> TorchBackend:
        monkeypatch.setattr(array_backends, "device", lambda: ops.device.type)
        monkeypatch.setattr(array_backends, "array_backend", lambda device=None: ops)
        return ops

    return put


def test_the_stand_in_knows_what_is_elsewhere() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        Elsewhere().zeros(3) + torch.ones(3)


@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_a_search_stays_on_its_device(type: str) -> None:
    fields = search_fields(
        drawn(512),
        None,
        FORMATS[type],
        SEARCH_SETTINGS[type],
        Elsewhere(),
        SEARCH_SETTINGS[type].native_effort,
    )
    assert fields.codes.shape == (
        32 * 512 // SEARCH_SETTINGS[type].block_values,
        SEARCH_SETTINGS[type].block_values,
    )


@pytest.mark.parametrize("type", SEARCH_SETTINGS)
def test_error_feedback_stays_on_its_device(type: str) -> None:
    ops = Elsewhere()
    made = factor_moments(correlated(512).astype(np.float32), ops)
    _, levels = error_feedback.round_with_feedback(
        ColumnFormat.from_format(FORMATS[type]), ops.zeros(512, PANEL_ROW_MULTIPLE), made, 2, ops
    )
    assert levels.device == error_feedback.output_errors(levels, made, 256).device == ops.device
    assert levels.shape == (512, PANEL_ROW_MULTIPLE)


def test_products_stay_on_their_device(use: Use) -> None:
    use(Elsewhere())
    rows = np.ones((8, 600), np.float32)
    sums = np.zeros((600, 600))
    moments_collector._triangle(sums, rows, rows)
    assert not sums.any()  # what no value is known of came back: the CPU was not asked


def test_a_factor_is_the_same_by_torch() -> None:
    moments = correlated(96).astype(np.float32)
    one, other = (factor_moments(moments, ops) for ops in (NumpyBackend(), TorchBackend("cpu")))
    assert one.damping == other.damping == DAMPING
    for name in ("moments", "feed", "weights"):
        np.testing.assert_allclose(
            getattr(one, name), getattr(other, name).numpy(), rtol=1e-5, atol=1e-7
        )
    assert not np.triu(other.feed.numpy()).any()


def test_what_is_not_positive_takes_more_damping_by_torch() -> None:
    unsound = (correlated(64) - 0.1 * np.eye(64)).astype(np.float32)
    assert (
        factor_moments(unsound, TorchBackend("cpu")).damping
        == factor_moments(unsound, NumpyBackend()).damping
        > DAMPING
    )


def test_a_device_without_room_to_factor_leaves_that_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError(WORDS)

    moments, ops = correlated(96).astype(np.float32), TorchBackend("cpu")
    monkeypatch.setattr(ops, "_udu", full)
    np.testing.assert_array_equal(
        factor_moments(moments, ops).feed.numpy(), factor_moments(moments, NumpyBackend()).feed
    )


def test_only_memory_is_taken_for_memory() -> None:
    ops = TorchBackend("cpu")
    with pytest.raises(DeviceOutOfMemory), ops.exclusive_access():
        raise RuntimeError(WORDS)
    with pytest.raises(RuntimeError, match="illegal memory access"), ops.exclusive_access():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with ops.exclusive_access():  # the turn was given back by both
        pass


@pytest.mark.parametrize("type", ["Q4_K", "Q5_1"])
def test_a_search_without_room_takes_fewer_rows_at_a_time(
    type: str, tmp_path: Path, use: Use
) -> None:
    moments, rows = correlated(256), drawn(256, 64)
    known = evidence(moments, tmp_path, len(rows))
    use(TorchBackend("cpu"))
    whole = made("search", type, rows, known)
    small = use(Small(16 * 256))
    parts = made("search", type, rows, known)
    assert lost(parts, type, rows, moments) == pytest.approx(
        lost(whole, type, rows, moments), rel=1e-3
    )
    assert max(map(np.prod, small.asked)) == rows.size


def test_a_panel_without_room_becomes_narrower_ones(tmp_path: Path, use: Use) -> None:
    moments, rows = correlated(256), drawn(256, 4 * PANEL_ROW_MULTIPLE)
    known = evidence(moments, tmp_path, len(rows))
    use(TorchBackend("cpu"))
    whole = lost(made("gptq", "Q4_K", rows, known), "Q4_K", rows, moments)
    small = use(Small(256 * 256))
    wide = evidence(moments, tmp_path, 2 * len(rows))
    narrow = made("gptq", "Q4_K", np.tile(rows, (2, 1)), wide)[: len(rows)]
    assert {(256, 8 * PANEL_ROW_MULTIPLE), (256, 4 * PANEL_ROW_MULTIPLE)} <= set(small.asked)
    assert lost(narrow, "Q4_K", rows, moments) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "room", "what"),
    [
        ("search", 0, "for blk.0.ffn_up.weight"),
        ("gptq", 256 * PANEL_ROW_MULTIPLE, "for the second moments of blk.0.ffn_up.weight"),
    ],
)
def test_no_room_at_all_is_told(
    method: str, room: int, what: str, tmp_path: Path, use: Use
) -> None:
    use(Small(room))
    with pytest.raises(UserError, match=f"the GPU has no memory left {what}") as told:
        made(method, "Q4_K", drawn(256), evidence(correlated(256), tmp_path))
    assert "CUDA_VISIBLE_DEVICES=" in str(told.value.hint)


def test_products_without_room_are_the_cpu_s(use: Use) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 600)).astype(np.float32)

    def summed() -> np.ndarray:
        sums = np.zeros((600, 600))
        moments_collector._triangle(sums, rows, rows)
        return np.tril(sums)

    plain = summed()
    use(Small(0))
    np.testing.assert_array_equal(summed(), plain)
    use(TorchBackend("cpu"))
    np.testing.assert_allclose(summed(), plain, rtol=1e-5, atol=1e-5)
    assert plain == pytest.approx(np.tril(rows.T.astype(np.float64) @ rows), abs=1e-4)


def test_every_method_that_computes_by_arrays_is_among_these() -> None:
    assert {name for name, method in METHODS.items() if method.backend_name()} == {"search", "gptq"}
