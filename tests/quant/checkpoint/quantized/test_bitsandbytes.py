"""bitsandbytes weights with known values are restored, or refused."""

import json
import re
from typing import Any

import numpy as np
import pytest

from quant.errors import UserError
from tests.quant.checkpoint.quantized.stored import Stored, floats, restore

SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SHAPE, BLOCK, NESTED_BLOCK = (24, 91), 64, 16


def random_matrix(
    kind: str, nested: bool, name: str = "a.weight", seed: int = 0
) -> tuple[dict[str, Any], np.ndarray]:
    """Return a random matrix: its stored tensors by name, and its values."""
    random, count = np.random.default_rng(seed), SHAPE[0] * SHAPE[1]
    blocks = -(-count // BLOCK)
    codes, value_map = random.integers(0, 16, count), random.uniform(-1, 1, 16).astype(np.float32)
    state = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": SHAPE}
    stored: dict[str, Any] = {}
    if nested:
        offset, groups = float(random.uniform(0.1, 0.2)), -(-blocks // NESTED_BLOCK)
        absmax = random.integers(0, 256, blocks).astype(np.uint8)
        nested_map = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        nested_absmax = random.uniform(0.01, 0.02, groups).astype(np.float32)
        scales = np.zeros(blocks, np.float32)
        for block in range(blocks):
            product = nested_map[absmax[block]] * nested_absmax[block // NESTED_BLOCK]
            scales[block] = product + np.float32(offset)
        state |= {
            "nested_blocksize": NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": offset,
        }
        stored |= {
            f"{name}.absmax": absmax,
            f"{name}.nested_absmax": nested_absmax,
            f"{name}.nested_quant_map": nested_map,
        }
    else:
        scales = random.uniform(0.01, 0.02, blocks).astype(np.float32)
        stored[f"{name}.absmax"] = scales
    values = np.zeros(count, np.float32)
    for i in range(count):
        values[i] = value_map[codes[i]] * scales[i // BLOCK]
    text = json.dumps(state).encode()
    stored |= {
        name: (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        f"{name}.quant_map": value_map,
        f"{name}.quant_state.bitsandbytes__{kind}": np.frombuffer(text, np.uint8),
    }
    return stored, values.reshape(SHAPE)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bit_codes_are_restored(kind: str, nested: bool) -> None:
    arrays, values = random_matrix(kind, nested)
    result = restore(SETTINGS, Stored({**arrays, "b.weight": np.ones((2, 2), np.float32)}))
    assert sorted(result) == ["a.weight", "b.weight"]
    for rows_per_read in (1, 7, 24):
        assert np.array_equal(floats(result["a.weight"], rows_per_read), values)


def test_codes_may_be_stored_in_the_bytes_of_floats() -> None:
    arrays, values = random_matrix("nf4", False)
    arrays["a.weight"] = ("BF16", arrays["a.weight"].reshape(-1).view(np.uint16)[:, None])
    assert np.array_equal(floats(restore(SETTINGS, Stored(arrays))["a.weight"]), values)


def test_one_description_of_each_kind_is_read_when_a_checkpoint_is_opened() -> None:
    arrays: dict[str, Any] = {}
    expected = {}
    for layer in range(20):
        for role in ("q", "k"):
            name = f"layers.{layer}.{role}.weight"
            stored, expected[name] = random_matrix("nf4", True, name, layer)
            arrays |= stored
    stored_arrays = Stored(arrays)
    result = restore(SETTINGS, stored_arrays)
    assert len(stored_arrays.reads) == 2
    for name, values in expected.items():
        assert np.array_equal(floats(result[name]), values)


def test_a_description_that_differs_from_similar_ones_is_refused_when_it_is_read() -> None:
    arrays = random_matrix("nf4", False, "layers.0.weight")[0]
    arrays |= random_matrix("nf4", False, "layers.1.weight")[0]
    text = json.dumps({"blocksize": BLOCK, "shape": [SHAPE[1], SHAPE[0]]}).encode()
    arrays["layers.1.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    result = restore(SETTINGS, Stored(arrays))
    assert floats(result["layers.0.weight"]).shape == SHAPE
    with pytest.raises(UserError, match=r"layers\.1\.weight and its scales do not fit the 24 x 91"):
        floats(result["layers.1.weight"])


def test_eight_bit_integers_are_restored() -> None:
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, SHAPE).astype(np.int8)
    scales = random.uniform(0.1, 0.2, SHAPE[0]).astype(np.float32)
    stored = Stored({"a.weight": codes, "a.SCB": scales, "a.weight_format": np.array(0, np.uint8)})
    result = restore(SETTINGS, stored)
    assert list(result) == ["a.weight"] and not stored.reads
    # the library multiplies by this constant instead of dividing by 127
    expected = codes.astype(np.float32) * scales[:, None] * np.float32(7.874015718698502e-3)
    assert np.array_equal(floats(result["a.weight"], 5), expected)


def state_text(**changes: object) -> np.ndarray:
    values = {"blocksize": BLOCK, "shape": SHAPE, **changes}
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


STATE = "a.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a.weight.absmax": None}, "has no a.weight.absmax"),
        ({"a.weight": None}, "has no a.weight"),
        ({"a.weight.absmax": np.ones(3, np.float32)}, "do not fit"),
        ({"a.weight.absmax": np.ones(35, np.uint8)}, "do not fit"),
        ({"a.weight.quant_map": np.ones(15, np.float32)}, "do not fit"),
        ({"a.weight.nested_absmax": np.ones(3, np.float32)}, "do not fit"),
        ({STATE: np.frombuffer(b"[]", np.uint8)}, "is not the description of a matrix"),
        ({STATE: np.frombuffer(b"{", np.uint8)}, "is not the description"),
        ({STATE: np.frombuffer(b"[" * 60000, np.uint8)}, "is not the description"),
        ({STATE: np.zeros(1 << 17, np.uint8)}, "is not the description"),
        ({STATE: state_text(shape=None)}, "is not the description"),
        ({STATE: state_text(shape=[24])}, "is not the description"),
        ({STATE: state_text(shape=[24, -91])}, "is not the description"),
        ({STATE: state_text(shape=[24, 1e9])}, "is not the description"),
        ({STATE: state_text(shape=[24, 92])}, "do not fit the 24 x 92 values"),
        ({STATE: state_text(blocksize=0)}, "is not the description"),
        ({STATE: state_text(nested_offset="x")}, "is not the description"),
        ({STATE: state_text(nested_offset=10**400)}, "is not the description"),
        ({STATE.replace("nf4", "af4"): np.ones(2, np.uint8)}, "af4 is not supported"),
    ],
)
def test_unsupported_or_inconsistent_tensors_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    arrays = {**random_matrix("nf4", False)[0], **changes}
    stored = Stored({name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError) as caught:
        restore(SETTINGS, stored)
    assert re.search(message, str(caught.value)), caught.value


def test_row_scales_that_do_not_fit_are_refused() -> None:
    arrays = {"a.weight": np.ones((4, 8), np.int8), "a.SCB": np.ones(8, np.float32)}
    with pytest.raises(UserError, match=r"a\.SCB is F32 \[8\], which does not fit"):
        restore(SETTINGS, Stored(arrays))
