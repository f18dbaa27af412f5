"""AWQ matrices with known values are restored in both layouts, or refused."""

import re
from typing import Any

import numpy as np
import pytest

from quant.checkpoint.quantized import gptq
from quant.errors import UserError
from tests.quant.checkpoint.quantized.stored import Stored, floats, restore

SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
PACK_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order_map of AutoAWQ's WQLinear_GEMM.from_linear


def pack(codes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Pack codes [n, m] of four bits into int32 words [n, m / 8]: code order[i] of each eight at
    bit 4 * i.
    """
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for row in range(codes.shape[0]):
        for word in range(codes.shape[1] // 8):
            for i in range(8):
                words[row, word] |= np.uint32(int(codes[row, word * 8 + order[i]]) << (4 * i))
    return words.view(np.int32)


def random_matrix(
    version: str, outputs: int = 24, inputs: int = 96
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a random matrix: its stored tensors by name, and its values [outputs, inputs]."""
    random = np.random.default_rng(3)
    codes, zeros = random.integers(0, 16, (outputs, inputs)), random.integers(0, 16, (outputs, 3))
    scales = random.uniform(0.01, 0.02, (outputs, 3)).astype(np.float16)
    values = np.zeros((outputs, inputs), np.float32)
    for i in range(outputs):
        for j in range(inputs):
            group = j // 32
            values[i, j] = np.float32(codes[i, j] - zeros[i, group]) * np.float32(scales[i, group])
    if version == "gemm":
        stored = {
            "qweight": pack(codes.T, PACK_ORDER),
            "qzeros": pack(zeros.T, PACK_ORDER),
            "scales": np.ascontiguousarray(scales.T),
        }
    else:  # the row of zeros has a multiple of 8 groups
        stored = {
            "qweight": pack(codes, tuple(range(8))),
            "qzeros": pack(np.pad(zeros, ((0, 0), (0, 5))), tuple(range(8))),
            "scales": np.pad(scales, ((0, 0), (0, 5))),
        }
    return {f"a.{name}": array for name, array in stored.items()}, values


@pytest.mark.parametrize("version", ["gemm", "GEMM", "gemv"])
@pytest.mark.parametrize("band", [100, 1 << 20])
def test_values_are_restored(version: str, band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "BAND_CODES", band)
    arrays, values = random_matrix(version.lower())
    stored = Stored({**arrays, "a.bias": np.ones(24, np.float16)})
    result = restore(SETTINGS | {"version": version}, stored)
    assert not stored.reads
    assert list(result) == ["a.bias", "a.weight"]
    for rows_per_read in (5, 24):
        assert np.array_equal(floats(result["a.weight"], rows_per_read), values)


def test_settings_of_older_tools_are_understood() -> None:
    arrays, values = random_matrix("gemm")
    settings = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True}
    assert np.array_equal(floats(restore(settings, Stored(arrays))["a.weight"]), values)


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"bits": 8}, {}, "AWQ with 8 bits is not supported; 4 are"),
        ({"version": "gemv_fast"}, {}, "the AWQ version 'gemv_fast' is not supported"),
        ({"version": 3}, {}, "the AWQ version 3"),
        ({"group_size": "x"}, {}, "group_size is 'x'"),
        ({"group_size": 16}, {}, "uses groups beyond its 3 scales"),
        ({}, {"a.qzeros": None}, "a.qweight has no a.qzeros"),
        ({}, {"a.scales": np.ones((3, 16), np.float16)}, "not 4-bit codes"),
        ({}, {"a.qzeros": np.ones((3, 2), np.int32)}, "not 4-bit codes"),
        ({}, {"a.qweight": np.ones((96, 3), np.float32)}, "not 4-bit codes"),
        ({"version": "gemv"}, {}, "not 4-bit codes"),
        ({}, {"a.weight": np.ones((24, 96), np.float32)}, "both as floats and as codes"),
    ],
)
def test_unsupported_or_inconsistent_tensors_are_refused(
    settings: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    arrays = {**random_matrix("gemm")[0], **change}
    stored = Stored({name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError) as caught:
        restore(SETTINGS | settings, stored)
    assert re.search(message, str(caught.value)), caught.value
