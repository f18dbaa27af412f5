"""The contract of every block format: byte-exact round trips, ggml's values, and nearest codes."""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from quant.errors import UserError
from quant.formats import FORMATS
from quant.formats.base import BlockFields, BlockFormat, ScalarFormat
from quant.native import ggml
from quant.recipes import file_types

# Those whose encoder makes itself large tables first: their blocks are made up here.
SLOW = [name for name in FORMATS if name.startswith(("IQ1", "IQ2", "IQ3"))]
QUICK = [name for name in FORMATS if name not in SLOW]
SCALARS = [name for name, known in FORMATS.items() if isinstance(known, ScalarFormat)]
IN_GGUF = [name for name in FORMATS if name not in ("Q1_0", "Q2_0")]
ROUNDED_LAST = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
]  # by ggml, with the scales as they are stored


def values(name: str) -> np.ndarray:
    """Blocks of all kinds: small, large, tiny, huge, all above zero, constant, zero of both signs,
    one outlier.
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


def anything(name: str, count: int = 500) -> np.ndarray:
    """Blocks of random bytes, that some of have scales which are infinite or no number."""
    blocks = np.random.default_rng(7).integers(
        0, 256, (count, ggml.block_size(name).nbytes), np.uint8
    )
    if name == "NVFP4":
        blocks[:, :4] &= 127  # its scales have no sign
    return blocks


def sound(name: str) -> BlockFields:
    """Random fields with finite scales; each group has one."""
    fields, random = FORMATS[name].unpack(anything(name)), np.random.default_rng(8)
    if name in ("MXFP4", "NVFP4"):
        return replace(fields, d=fields.d.clip(0, 2.0**99))
    d = random.normal(0, 1, fields.d.shape).astype(np.float16)
    m = None if fields.m is None else random.normal(0, 1, fields.m.shape).astype(np.float16)
    return replace(fields, d=d, m=m)


def same(one: BlockFields, other: BlockFields) -> bool:
    return all(
        np.array_equal(getattr(one, part), getattr(other, part), equal_nan=True)
        for part in ("codes", "d", "m", "scales", "mins")
        if getattr(one, part) is not None or getattr(other, part) is not None
    )


def test_all_formats_that_can_be_written_are_there() -> None:
    assert set(FORMATS) == {name for name in file_types.TENSOR_TYPES if ggml.is_quantized(name)}


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", QUICK)
def test_what_ggml_wrote_comes_back_to_the_byte_and_reads_to_the_last_bit(
    name: str, weighed: bool
) -> None:
    known = FORMATS[name]
    blocks = known.encode(values(name), importance=weights(name) if weighed else None)
    fields = known.unpack(blocks)
    assert np.array_equal(known.pack(fields), blocks)
    ours = known.value(fields)
    assert ours.dtype == np.float32
    assert ours.tobytes() == known.decode(blocks).tobytes()
    if name in IN_GGUF:
        assert np.array_equal(ours, gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_come_back_and_read_as_ggml_reads_them(name: str) -> None:
    known, blocks = FORMATS[name], anything(name)
    fields = known.unpack(blocks)
    packed = known.pack(fields)
    if name in ("TQ1_0", "NVFP4"):  # some bytes mean the same as others, which are written
        assert not np.array_equal(packed, blocks)
        assert same(known.unpack(packed), fields)
    else:
        assert np.array_equal(packed, blocks)
    with np.errstate(invalid="ignore", over="ignore"):
        ours, theirs = known.value(fields), known.decode(blocks)
        assert np.array_equal(ours, theirs, equal_nan=True)
        if name in IN_GGUF:
            read = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
            assert np.array_equal(ours, read, equal_nan=True)
    for part in (fields.codes, fields.scales, fields.mins):
        assert part is None or part.min() < part.max()


@pytest.mark.parametrize("name", FORMATS)
def test_sound_fields_are_sound_blocks_and_read_to_the_last_bit(name: str) -> None:
    known, fields = FORMATS[name], sound(name)
    blocks = known.pack(fields)
    assert same(known.unpack(blocks), fields)
    assert known.value(fields).tobytes() == known.decode(blocks).tobytes()


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", QUICK)
def test_what_is_fitted_is_what_ggml_writes(name: str, weighed: bool) -> None:
    known, importance = FORMATS[name], weights(name) if weighed else None
    blocks = known.pack(known.fit(values(name), importance))
    assert np.array_equal(blocks, known.encode(values(name), importance=importance))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_what_a_format_cannot_hold_is_not_fitted(
    name: str, bad: float, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = values(name)
    blocks[40, 3] = bad
    with pytest.raises(UserError, match=r"contains NaN or infinite|does not fit"):
        FORMATS[name].fit(blocks)


def every_code(known: BlockFormat, fields: BlockFields) -> np.ndarray:
    """What each code would stand for, [codes, blocks, values]."""
    low, high = getattr(known, "low", 0), getattr(known, "high", 15)
    if known.name == "Q1_0":
        high = 1
    return np.array(
        [
            known.value(replace(fields, codes=np.full_like(fields.codes, c)))
            for c in range(low, high + 1)
        ]
    )


@pytest.mark.parametrize("name", SCALARS)
def test_no_other_code_is_nearer(name: str) -> None:
    known, numbers = FORMATS[name], values(name)
    fields = known.fit(numbers)
    codes = known.nearest_codes(numbers, fields)
    found = known.value(replace(fields, codes=codes))
    errors = np.abs(every_code(known, fields).astype(np.float64) - numbers)
    slack = 1e-6 * np.abs(numbers).max(
        axis=1, keepdims=True
    )  # where two are as near but for a rounding
    assert (np.abs(found.astype(np.float64) - numbers) <= errors.min(axis=0) + slack).all()


@pytest.mark.parametrize("name", SCALARS)
def test_what_codes_stand_for_gets_the_same_codes(name: str) -> None:
    known = FORMATS[name]
    fields = known.fit(values(name))
    codes = known.nearest_codes(known.value(fields), fields)
    told = np.broadcast_to(
        known.steps(fields)[0] != 0, codes.reshape(len(codes), fields.group_count, -1).shape
    )
    told = told.reshape(codes.shape)
    assert told.any()
    assert np.array_equal(codes[told], fields.codes[told])
    assert np.array_equal(known.value(replace(fields, codes=codes)), known.value(fields))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", ROUNDED_LAST)
def test_codes_are_ggmls_where_it_rounds_with_the_stored_scales(name: str, weighed: bool) -> None:
    known, numbers = FORMATS[name], values(name)
    fields = known.fit(numbers, weights(name) if weighed else None)
    step = np.broadcast_to(
        known.steps(fields)[0],
        (len(numbers), fields.group_count, numbers.shape[1] // fields.group_count),
    )
    told = step.reshape(numbers.shape) != 0  # where it is zero ggml leaves what it tried last
    assert np.array_equal(known.nearest_codes(numbers, fields)[told], fields.codes[told])


@pytest.mark.parametrize("name", SCALARS)
def test_codes_are_in_range_whatever_the_numbers_and_the_scales(name: str) -> None:
    known, random = FORMATS[name], np.random.default_rng(9)
    fields = known.unpack(anything(name))
    shape = fields.codes.shape
    numbers = random.integers(0, 1 << 32, shape, np.uint32).view(
        np.float32
    )  # all kinds: NaN, infinite, subnormal
    codes = known.nearest_codes(numbers, fields)
    least, most = (0, 2) if name.startswith("TQ") else (fields.codes.min(), fields.codes.max())
    assert codes.shape == shape and codes.dtype == np.int16
    assert least <= codes.min() < codes.max() <= most
    known.pack(replace(fields, codes=codes))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "NVFP4"])
def test_columns_get_the_codes_of_whole_blocks(name: str) -> None:
    known, numbers = FORMATS[name], values(name)
    fields = known.fit(numbers)
    width = numbers.shape[1] // fields.group_count
    codes = known.nearest_codes(numbers, fields)
    found, read = [], []
    for column in range(numbers.shape[1]):
        part = fields.group(column // width)
        found.append(known.nearest_codes(numbers[:, column : column + 1], part))
        read.append(known.value(replace(part, codes=found[-1])))
    assert np.array_equal(np.concatenate(found, axis=1), codes)
    assert np.array_equal(np.concatenate(read, axis=1), known.value(replace(fields, codes=codes)))


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_of_torch_get_the_same_codes_and_values(name: str) -> None:
    torch = pytest.importorskip("torch")
    known, fields = FORMATS[name], sound(name)
    parts = {
        part: None if getattr(fields, part) is None else torch.tensor(getattr(fields, part))
        for part in ("codes", "d", "m", "scales", "mins")
    }
    tensors = BlockFields(**parts)
    numbers = known.value(fields)
    assert np.array_equal(known.value(tensors).numpy(), numbers)
    if isinstance(known, ScalarFormat):
        found = known.nearest_codes(torch.tensor(numbers), tensors)
        assert np.array_equal(found.numpy(), known.nearest_codes(numbers, fields))


def test_a_block_by_hand() -> None:
    known = FORMATS["Q4_0"]
    block = np.concatenate(
        [np.array([0.5], np.float16).view(np.uint8), np.arange(16, dtype=np.uint8) * 17]
    )[None]
    fields = known.unpack(block)
    assert fields.codes.tolist() == [[*range(16), *range(16)]]
    assert known.value(fields)[0, :3].tolist() == [-4.0, -3.5, -3.0]


def test_a_block_of_vectors_by_hand() -> None:
    known = FORMATS["IQ2_XXS"]
    block = np.zeros((1, 66), np.uint8)
    block[0, :2] = np.array([2.0], np.float16).view(np.uint8)
    block[0, 6], block[0, 9] = (
        0b101,
        3 << 4,
    )  # signs of the first vector, and the scale of the first four
    fields = known.unpack(block)
    assert fields.codes[0, :2].tolist() == [0b101 << 8, 0]
    assert fields.scales.tolist() == [[7, *[1] * 7]]
    # ggml: d times (0.5 + 3) / 4, the first vector of the grid is eight times 8, the eighth sign is
    # even
    assert known.value(fields)[0, :9].tolist() == [-14, 14, -14, 14, 14, 14, 14, 14, 14]


def test_halfway_between_two_floats_is_rounded_as_ggml_rounds_it() -> None:
    known, between = FORMATS["MXFP4"], [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    numbers = np.zeros((1, 32), np.float32)
    numbers[0, :15] = [6, *between, *(-number for number in between)]
    fields = known.fit(numbers)
    assert known.nearest_codes(numbers, fields).tolist() == fields.codes.tolist()
    assert known.value(fields)[0, :8].tolist() == [6, 0, 0.5, 1, 1.5, 2, 3, 4]
