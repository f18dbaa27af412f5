"""The contract of every block format: taken apart and put together to the byte, read to the last bit as ggml reads."""

import gguf
import numpy as np
import pytest

from quant import native
from quant.formats import FORMATS


def values(name: str) -> np.ndarray:
    """Blocks of several kinds: small, large, all above zero, constant, all zero, one outlier."""
    random, width = np.random.default_rng(5), native.block(name).values
    blocks = random.normal(0, 1, (64, width)) * np.exp(random.normal(0, 3, (64, 1)))
    blocks[:8] = np.abs(blocks[:8])
    blocks[8:12] = 0.37
    blocks[12:16] = 0
    blocks[16:20, 5] *= 100
    return blocks.astype(np.float32)


def test_the_formats_that_are_there() -> None:
    assert set(FORMATS) == {
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    }  # fmt: skip


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_ggml_wrote_comes_back_to_the_byte_and_reads_to_the_last_bit(name: str, weighed: bool) -> None:
    known = FORMATS[name]
    importance = np.random.default_rng(6).exponential(1, native.block(name).values).astype(np.float32)
    blocks = known.encode(values(name), importance=importance if weighed else None)
    fields = known.unpack(blocks)
    assert np.array_equal(known.pack(fields), blocks)
    ours = known.value(fields)
    assert ours.dtype == np.float32
    assert ours.tobytes() == known.decode(blocks).tobytes()
    assert np.array_equal(ours, gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_come_back_and_read_as_ggml_reads_them(name: str) -> None:
    known, random = FORMATS[name], np.random.default_rng(7)
    blocks = random.integers(0, 256, (500, native.block(name).nbytes), np.uint8)
    fields = known.unpack(blocks)
    assert np.array_equal(known.pack(fields), blocks)
    with np.errstate(invalid="ignore", over="ignore"):
        ours, theirs = known.value(fields), known.decode(blocks)
    # Random scales may be infinite or no number at all.
    assert np.array_equal(ours, theirs, equal_nan=True)
    for part in (fields.codes, fields.scales, fields.mins):
        assert part is None or part.min() < part.max()


def test_a_block_by_hand() -> None:
    known = FORMATS["Q4_0"]
    block = np.concatenate([np.array([0.5], np.float16).view(np.uint8), np.arange(16, dtype=np.uint8) * 17])[None]
    fields = known.unpack(block)
    assert fields.codes.tolist() == [[*range(16), *range(16)]]
    assert known.value(fields)[0, :3].tolist() == [-4.0, -3.5, -3.0]
