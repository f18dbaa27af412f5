"""Every block format: byte-exact round trips, the values of ggml, and the nearest codes."""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from quant.errors import UserError
from quant.formats import FORMATS
from quant.formats.base import BlockFields, BlockFormat, ScalarFormat
from quant.native import ggml
from quant.recipes import file_types

# The encoders of these formats first build large tables, so the tests use random blocks instead.
SLOW_ENCODERS = [name for name in FORMATS if name.startswith(("IQ1", "IQ2", "IQ3"))]
FAST_ENCODERS = [name for name in FORMATS if name not in SLOW_ENCODERS]
SCALARS = [name for name, block_format in FORMATS.items() if isinstance(block_format, ScalarFormat)]
IN_GGUF = [name for name in FORMATS if name not in ("Q1_0", "Q2_0")]
ROUNDED_LAST = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
]  # ggml rounds the codes of these formats last, with the stored scales


def values(name: str) -> np.ndarray:
    """Return 96 blocks of floats for a format.

    They include tiny, huge, positive and constant values, zeros of both signs, and outliers.
    """
    random, width = np.random.default_rng(5), ggml.block_size(name).values
    blocks = random.normal(0, 1, (96, width)) * np.exp(random.normal(0, 3, (96, 1)))
    blocks[:8] = np.abs(blocks[:8])
    blocks[8:12] = 0.37
    blocks[12:16] = 0
    blocks[14, ::2], blocks[15] = -0.0, -0.0
    blocks[16:20, 5] *= 100
    blocks[20:24] = 0
    blocks[20:24, 7] = [1, -1, 3e4, -3e4]
    blocks[64:72] *= 1e-7 / np.abs(blocks[64:72]).max()
    blocks[72:76] *= 1e-20 / np.abs(blocks[72:76]).max()
    blocks[76:84] *= 6e4 / np.abs(blocks[76:84]).max(axis=1, keepdims=True)
    return blocks.clip(-6e4, 6e4).astype(np.float32)


def weights(name: str) -> np.ndarray:
    return np.random.default_rng(6).exponential(1, ggml.block_size(name).values).astype(np.float32)


def random_blocks(name: str, count: int = 500) -> np.ndarray:
    """Return blocks of random bytes. Some of them have scales that are infinite or NaN."""
    blocks = np.random.default_rng(7).integers(
        0, 256, (count, ggml.block_size(name).nbytes), np.uint8
    )
    if name == "NVFP4":
        blocks[:, :4] &= 127  # the sign bits of its scales are unused
    return blocks


def finite_fields(name: str) -> BlockFields:
    """Return the fields of random blocks, with finite scales."""
    fields, random = FORMATS[name].unpack(random_blocks(name)), np.random.default_rng(8)
    if name in ("MXFP4", "NVFP4"):
        return replace(fields, d=fields.d.clip(0, 2.0**99))
    d = random.normal(0, 1, fields.d.shape).astype(np.float16)
    m = None if fields.m is None else random.normal(0, 1, fields.m.shape).astype(np.float16)
    return replace(fields, d=d, m=m)


def equal_fields(first: BlockFields, second: BlockFields) -> bool:
    return all(
        np.array_equal(getattr(first, name), getattr(second, name), equal_nan=True)
        for name in ("codes", "d", "m", "scales", "mins")
        if getattr(first, name) is not None or getattr(second, name) is not None
    )


def test_every_quantized_type_has_a_format() -> None:
    assert set(FORMATS) == {name for name in file_types.TENSOR_TYPES if ggml.is_quantized(name)}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", FAST_ENCODERS)
def test_blocks_of_ggml_round_trip_and_decode_exactly(name: str, weighted: bool) -> None:
    block_format = FORMATS[name]
    blocks = block_format.encode(values(name), importance=weights(name) if weighted else None)
    fields = block_format.unpack(blocks)
    assert np.array_equal(block_format.pack(fields), blocks)
    ours = block_format.value(fields)
    assert ours.dtype == np.float32
    assert ours.tobytes() == block_format.decode(blocks).tobytes()
    if name in IN_GGUF:
        assert np.array_equal(ours, gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_random_bytes_round_trip_and_decode_as_in_ggml(name: str) -> None:
    block_format, blocks = FORMATS[name], random_blocks(name)
    fields = block_format.unpack(blocks)
    packed = block_format.pack(fields)
    if name in (
        "TQ1_0",
        "NVFP4",
    ):  # several byte patterns have the same values, and only one of them is written
        assert not np.array_equal(packed, blocks)
        assert equal_fields(block_format.unpack(packed), fields)
    else:
        assert np.array_equal(packed, blocks)
    with np.errstate(invalid="ignore", over="ignore"):
        ours, theirs = block_format.value(fields), block_format.decode(blocks)
        assert np.array_equal(ours, theirs, equal_nan=True)
        if name in IN_GGUF:
            decoded = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
            assert np.array_equal(ours, decoded, equal_nan=True)
    for field in (fields.codes, fields.scales, fields.mins):
        assert field is None or field.min() < field.max()


@pytest.mark.parametrize("name", FORMATS)
def test_finite_fields_round_trip_and_decode_exactly(name: str) -> None:
    block_format, fields = FORMATS[name], finite_fields(name)
    blocks = block_format.pack(fields)
    assert equal_fields(block_format.unpack(blocks), fields)
    assert block_format.value(fields).tobytes() == block_format.decode(blocks).tobytes()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", FAST_ENCODERS)
def test_fitted_blocks_equal_those_of_ggml(name: str, weighted: bool) -> None:
    block_format, importance = FORMATS[name], weights(name) if weighted else None
    blocks = block_format.pack(block_format.fit(values(name), importance))
    assert np.array_equal(blocks, block_format.encode(values(name), importance=importance))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_values_that_a_format_cannot_represent_are_refused(
    name: str, bad: float, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = values(name)
    blocks[40, 3] = bad
    with pytest.raises(UserError, match=r"contains NaN or infinite|does not fit"):
        FORMATS[name].fit(blocks)


def values_of_all_codes(block_format: BlockFormat, fields: BlockFields) -> np.ndarray:
    """Return the values of all possible codes, of shape [codes, blocks, values per block]."""
    low, high = getattr(block_format, "low", 0), getattr(block_format, "high", 15)
    if block_format.name == "Q1_0":
        high = 1
    return np.array(
        [
            block_format.value(replace(fields, codes=np.full_like(fields.codes, c)))
            for c in range(low, high + 1)
        ]
    )


@pytest.mark.parametrize("name", SCALARS)
def test_nearest_codes_have_the_least_error(name: str) -> None:
    block_format, numbers = FORMATS[name], values(name)
    fields = block_format.fit(numbers)
    codes = block_format.nearest_codes(numbers, fields)
    decoded = block_format.value(replace(fields, codes=codes))
    errors = np.abs(values_of_all_codes(block_format, fields).astype(np.float64) - numbers)
    slack = 1e-6 * np.abs(numbers).max(
        axis=1, keepdims=True
    )  # two codes may be equally near except for rounding errors
    assert (np.abs(decoded.astype(np.float64) - numbers) <= errors.min(axis=0) + slack).all()


@pytest.mark.parametrize("name", SCALARS)
def test_values_of_codes_get_the_same_codes(name: str) -> None:
    block_format = FORMATS[name]
    fields = block_format.fit(values(name))
    codes = block_format.nearest_codes(block_format.value(fields), fields)
    nonzero_step = np.broadcast_to(
        block_format.steps(fields)[0] != 0, codes.reshape(len(codes), fields.group_count, -1).shape
    )
    nonzero_step = nonzero_step.reshape(codes.shape)
    assert nonzero_step.any()
    assert np.array_equal(codes[nonzero_step], fields.codes[nonzero_step])
    assert np.array_equal(
        block_format.value(replace(fields, codes=codes)), block_format.value(fields)
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ROUNDED_LAST)
def test_nearest_codes_equal_ggml_where_it_uses_the_stored_scales(
    name: str, weighted: bool
) -> None:
    block_format, numbers = FORMATS[name], values(name)
    fields = block_format.fit(numbers, weights(name) if weighted else None)
    step = np.broadcast_to(
        block_format.steps(fields)[0],
        (len(numbers), fields.group_count, numbers.shape[1] // fields.group_count),
    )
    nonzero_step = (
        step.reshape(numbers.shape) != 0
    )  # for a step of zero ggml keeps the code of its last attempt
    assert np.array_equal(
        block_format.nearest_codes(numbers, fields)[nonzero_step], fields.codes[nonzero_step]
    )


@pytest.mark.parametrize("name", SCALARS)
def test_codes_are_in_range_for_any_numbers_and_scales(name: str) -> None:
    block_format, random = FORMATS[name], np.random.default_rng(9)
    fields = block_format.unpack(random_blocks(name))
    shape = fields.codes.shape
    numbers = random.integers(0, 1 << 32, shape, np.uint32).view(
        np.float32
    )  # includes NaN, infinite and subnormal numbers
    codes = block_format.nearest_codes(numbers, fields)
    smallest, largest = (
        (0, 2) if name.startswith("TQ") else (fields.codes.min(), fields.codes.max())
    )
    assert codes.shape == shape and codes.dtype == np.int16
    assert smallest <= codes.min() < codes.max() <= largest
    block_format.pack(replace(fields, codes=codes))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "NVFP4"])
def test_codes_of_single_columns_equal_those_of_blocks(name: str) -> None:
    block_format, numbers = FORMATS[name], values(name)
    fields = block_format.fit(numbers)
    width = numbers.shape[1] // fields.group_count
    codes = block_format.nearest_codes(numbers, fields)
    column_codes, column_values = [], []
    for column in range(numbers.shape[1]):
        group = fields.group(column // width)
        column_codes.append(block_format.nearest_codes(numbers[:, column : column + 1], group))
        column_values.append(block_format.value(replace(group, codes=column_codes[-1])))
    assert np.array_equal(np.concatenate(column_codes, axis=1), codes)
    assert np.array_equal(
        np.concatenate(column_values, axis=1), block_format.value(replace(fields, codes=codes))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_torch_tensors_give_the_same_codes_and_values(name: str) -> None:
    torch = pytest.importorskip("torch")
    block_format, fields = FORMATS[name], finite_fields(name)
    torch_fields = {
        field: None if getattr(fields, field) is None else torch.tensor(getattr(fields, field))
        for field in ("codes", "d", "m", "scales", "mins")
    }
    tensors = BlockFields(**torch_fields)
    numbers = block_format.value(fields)
    assert np.array_equal(block_format.value(tensors).numpy(), numbers)
    if isinstance(block_format, ScalarFormat):
        torch_codes = block_format.nearest_codes(torch.tensor(numbers), tensors)
        assert np.array_equal(torch_codes.numpy(), block_format.nearest_codes(numbers, fields))


def test_block_built_by_hand() -> None:
    block_format = FORMATS["Q4_0"]
    block = np.concatenate(
        [np.array([0.5], np.float16).view(np.uint8), np.arange(16, dtype=np.uint8) * 17]
    )[None]
    fields = block_format.unpack(block)
    assert fields.codes.tolist() == [[*range(16), *range(16)]]
    assert block_format.value(fields)[0, :3].tolist() == [-4.0, -3.5, -3.0]


def test_iq2_block_built_by_hand() -> None:
    block_format = FORMATS["IQ2_XXS"]
    block = np.zeros((1, 66), np.uint8)
    block[0, :2] = np.array([2.0], np.float16).view(np.uint8)
    block[0, 6], block[0, 9] = (
        0b101,
        3 << 4,
    )  # the signs of the first vector, and the scale of the first four vectors
    fields = block_format.unpack(block)
    assert fields.codes[0, :2].tolist() == [0b101 << 8, 0]
    assert fields.scales.tolist() == [[7, *[1] * 7]]
    # ggml multiplies d with (0.5 + 3) / 4. The first vector of the grid has eight values of 8. The
    # eighth sign makes the number of minus signs even.
    assert block_format.value(fields)[0, :9].tolist() == [-14, 14, -14, 14, 14, 14, 14, 14, 14]


def test_midpoints_are_rounded_as_in_ggml() -> None:
    block_format, between = FORMATS["MXFP4"], [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    numbers = np.zeros((1, 32), np.float32)
    numbers[0, :15] = [6, *between, *(-number for number in between)]
    fields = block_format.fit(numbers)
    assert block_format.nearest_codes(numbers, fields).tolist() == fields.codes.tolist()
    assert block_format.value(fields)[0, :8].tolist() == [6, 0, 0.5, 1, 1.5, 2, 3, 4]
