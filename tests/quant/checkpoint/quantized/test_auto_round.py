"""AutoRound matrices with known values are restored in each packing, or refused."""

import re
from typing import Any

import numpy as np
import pytest

from quant.errors import UserError
from tests.quant.checkpoint.quantized import test_awq
from tests.quant.checkpoint.quantized.stored import Stored, floats, pack_bit_stream, restore

SETTINGS = {"quant_method": "auto-round", "bits": 4, "group_size": 32}


def random_matrix(bits: int, subtracted: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a random matrix: its stored tensors by name, and its values [outputs, inputs].
    `subtracted` is subtracted from each zero before it is stored.
    """
    random, outputs, inputs = np.random.default_rng(bits), 64, 96
    codes = random.integers(0, 2**bits, (inputs, outputs))
    zeros = random.integers(subtracted, 2**bits, (3, outputs))
    scales = random.uniform(0.01, 0.02, (3, outputs)).astype(np.float16)
    values = np.zeros((outputs, inputs), np.float32)
    for i in range(outputs):
        for j in range(inputs):
            group = j // 32
            values[i, j] = np.float32(codes[j, i] - zeros[group, i]) * np.float32(scales[group, i])
    stored = {
        "qweight": np.ascontiguousarray(pack_bit_stream(codes.T, bits).T),
        "qzeros": pack_bit_stream(zeros - subtracted, bits),
        "scales": scales,
    }
    return stored, values


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    ("packing", "subtracted"),
    [
        ("auto_round:auto_gptq", 1),
        ("auto_round:gptq", 1),
        (None, 1),
        ("auto_round:gptq:exllamav2", 1),
        ("auto_round", 0),
        ("auto_round:gptqmodel", 0),
    ],
)
def test_gptq_packing_is_restored(bits: int, packing: str | None, subtracted: int) -> None:
    arrays, values = random_matrix(bits, subtracted)
    stored = Stored({f"a.{name}": array for name, array in arrays.items()})
    result = restore(SETTINGS | {"packing_format": packing}, stored)
    assert list(result) == ["a.weight"] and not stored.reads
    for rows_per_read in (5, 64):
        assert np.array_equal(floats(result["a.weight"], rows_per_read), values)


def test_layers_with_other_bits_and_floats_are_restored() -> None:
    four, four_values = random_matrix(4, 1)
    eight, eight_values = random_matrix(8, 1)
    head = np.ones((4, 4), np.float32)
    stored = Stored(
        {f"a.{name}": array for name, array in four.items()}
        | {f"b.{name}": array for name, array in eight.items()}
        | {"lm_head.weight": head}
    )
    extra = {"b": {"bits": 8}, "lm_head": {"bits": 16, "data_type": "fp"}}
    result = restore(SETTINGS | {"extra_config": extra}, stored)
    assert np.array_equal(floats(result["a.weight"]), four_values)
    assert np.array_equal(floats(result["b.weight"]), eight_values)
    assert result["lm_head.weight"] is stored.tensors["lm_head.weight"]


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq"])
def test_awq_packing_is_restored(packing: str) -> None:
    arrays, values = test_awq.random_matrix("gemm")
    result = restore(SETTINGS | {"packing_format": packing}, Stored(arrays))
    assert np.array_equal(floats(result["a.weight"]), values)


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"packing_format": "auto_round:marlin"}, {}, "packing 'marlin' is not supported"),
        ({"packing_format": ["x"]}, {}, "is not supported"),
        ({"rotation_config": {"a": 1}}, {}, "AutoRound with rotation_config is not supported"),
        ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, {}, "scales in E5M3"),
        ({"group_size": 16}, {}, "uses groups beyond its 3 scales"),
        ({"group_size": None}, {}, "group_size is None"),
        ({}, {"qzeros": np.ones((3, 2), np.int32)}, "fit no codes of 2 to 8 bits"),
        ({}, {"qzeros": np.ones((3, 16), np.int32), "scales": None}, "has no a.scales"),
        ({}, {"qweight": np.ones((13, 64), np.float32)}, "not 4-bit codes"),
    ],
)
def test_unsupported_or_inconsistent_tensors_are_refused(
    settings: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    arrays = {**random_matrix(4, 1)[0], **change}
    stored = Stored({f"a.{name}": array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError) as caught:
        restore(SETTINGS | settings, stored)
    assert re.search(message, str(caught.value)), caught.value
