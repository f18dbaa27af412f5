"""libggml through ctypes, compared with its own type names and with the gguf package."""

import ctypes

import gguf
import numpy as np
import pytest

from quant.errors import UserError
from quant.native import ggml
from quant.recipes import file_types
from quant.recipes.file_types import TYPES_ABORTING_WITHOUT_IMATRIX

QUANTIZED = [name for name in file_types.TENSOR_TYPES if ggml.is_quantized(name)]


def rows(count: int = 24, columns: int = 512) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.3, (count, columns)).astype(np.float32)


def test_type_names_equal_those_of_the_library() -> None:
    lib = ggml.open_library()
    lib.ggml_type_name.restype = ctypes.c_char_p
    assert {n: lib.ggml_type_name(n).decode().upper() for n in ggml.TYPE_NAMES} == ggml.TYPE_NAMES


@pytest.mark.parametrize("name", sorted(set(QUANTIZED) - {"Q1_0", "Q2_0"}))
def test_decoding_equals_the_gguf_package(name: str) -> None:
    codes = ggml.encode(
        rows(), name, label="t", importance=ggml.Importance(np.ones((1, 512), np.float32), 24)
    )
    ours = ggml.decode(codes, name, 512, label="t")
    theirs = gguf.dequantize(codes, gguf.GGMLQuantizationType[name])
    assert np.array_equal(ours, theirs)


@pytest.mark.usefixtures("each_kernel_level")
def test_every_f16_value_is_decoded_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    for row in (halves, halves[5:-2]):
        decoded = ggml.decode(row.view(np.uint8), "F16", row.size, label="all")[0]
        expected = row.view(np.float16).astype(np.float32)
        valid = ~np.isnan(expected)
        assert np.isnan(decoded[~valid]).all()
        assert (decoded[valid].view(np.uint32) == expected[valid].view(np.uint32)).all()


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_encoding_equals_the_gguf_package(name: str) -> None:
    ours = ggml.encode(rows(), name, label="t")
    theirs = gguf.quantize(rows(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(ours.reshape(-1), np.ascontiguousarray(theirs).view(np.uint8).reshape(-1))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_1", "IQ4_NL"])
def test_each_matrix_of_a_stack_uses_its_own_importance(name: str) -> None:
    vectors = np.random.default_rng(2).exponential(1, (3, 512)).astype(np.float32)
    stacked = ggml.encode(rows(), name, label="t", importance=ggml.Importance(vectors, 8))
    separate = [
        ggml.encode(
            rows()[8 * i : 8 * i + 8],
            name,
            label="t",
            importance=ggml.Importance(vectors[i : i + 1], 8),
        )
        for i in range(3)
    ]
    assert np.array_equal(stacked, np.concatenate(separate))
    remaining = ggml.Importance(vectors, 8).after(5)
    assert np.array_equal(
        stacked[5:], ggml.encode(rows()[5:], name, label="t", importance=remaining)
    )
    assert not np.array_equal(stacked, ggml.encode(rows(), name, label="t"))


def test_types_that_abort_without_an_imatrix_are_listed() -> None:
    lib = ggml.open_library()
    aborting = {
        name for name in QUANTIZED if lib.ggml_quantize_requires_imatrix(ggml.TYPE_NUMBERS[name])
    }
    assert aborting == TYPES_ABORTING_WITHOUT_IMATRIX


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    broken = rows()
    broken[7, 300] = bad
    with pytest.raises(UserError, match=r"blk\.3\.ffn_up\.weight contains NaN or infinite"):
        ggml.encode(broken, "Q4_K", label="blk.3.ffn_up.weight")


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_copied_blocks_are_checked_for_nan(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    codes = ggml.encode(rows(), name, label="t")
    ggml.require_finite(codes, name, label="t")
    invalid_bytes = {"F32": b"\0\0\xc0\x7f", "F16": b"\0\x7c", "BF16": b"\x80\xff"}.get(
        name, b"\0\x7e"
    )
    codes[7, : len(invalid_bytes)] = np.frombuffer(
        invalid_bytes, np.uint8
    )  # a NaN, infinity, -infinity, or a NaN as the scale of a block
    with pytest.raises(UserError, match=r"blk\.3\.ffn_up\.weight contains NaN or infinite"):
        ggml.require_finite(codes, name, label="blk.3.ffn_up.weight")


def test_value_outside_the_range_of_f16_is_refused_but_fits_bf16(
    capfd: pytest.CaptureFixture[str],
) -> None:
    large = rows()
    large[0, 0] = 1e6
    with pytest.raises(UserError, match="does not fit into F16"):
        ggml.encode(large, "F16", label="t")
    codes = ggml.encode(large, "BF16", label="t")
    assert ggml.decode(codes, "BF16", 512, label="t")[0, 0] == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("name", ["IQ3_S", "IQ3_XXS", "IQ2_S", "Q2_K", "Q4_0"])
def test_values_that_would_abort_ggml_are_refused(name: str) -> None:
    large = rows()
    large[3, 7] = -1e30
    with pytest.raises(UserError, match=f"blk.3.x does not fit into {name}"):
        ggml.encode(large, name, label="blk.3.x")


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ1_S", "IQ3_S", "Q4_K", "Q5_1"])
def test_importance_that_would_abort_ggml_is_refused(name: str) -> None:
    vectors = np.ones((3, 512), np.float32)
    vectors[2, 5] = 3e38
    with pytest.raises(UserError, match=r"the importance of blk.3.x reaches 3e\+38"):
        ggml.encode(rows(), name, label="blk.3.x", importance=ggml.Importance(vectors, 8))


def test_types_without_a_search_accept_large_values() -> None:
    for name in ("MXFP4", "BF16", "F32"):
        large = rows() * np.float32(1e30)
        codes = ggml.encode(
            large, name, label="t", importance=ggml.Importance(np.ones((1, 512), np.float32), 24)
        )
        assert np.allclose(ggml.decode(codes, name, 512, label="t"), large, rtol=0.3, atol=1e29)


@pytest.mark.usefixtures("each_kernel_level")
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_our_encoders_give_the_bytes_of_ggml(name: str) -> None:
    """The values include normal weights, constant groups, outliers, ties, one sign, and tiny and
    huge numbers. The number of superblocks is odd.
    """
    if ggml._encoder(name) is None:
        pytest.skip("our encoders are not installed, or this ggml contracts multiply-adds")
    random, lib = np.random.default_rng(5), ggml.open_library()
    normal = random.normal(0, 1, (3, 37 * 256)).astype(np.float32)
    grouped = normal * np.repeat(random.choice([0, 1, 1e-20, 1e6], (3, 37 * 16)), 16, 1)
    outlier = normal * np.where(random.random(normal.shape) < 0.004, 1e5, 1e-3)
    ties = np.round(normal * 2) / 2
    wide = normal * np.exp2(random.uniform(-60, 20, normal.shape))
    for values in (
        normal * 0.02,
        grouped,
        outlier,
        ties,
        np.abs(normal),
        -np.abs(normal),
        wide,
        normal * 0 - 0.0,
    ):
        rows = np.ascontiguousarray(values, np.float32)
        expected = np.empty((3, ggml.row_bytes(name, rows.shape[1])), np.uint8)
        number = ggml.TYPE_NUMBERS[name]
        lib.ggml_quantize_chunk(
            number, rows.ctypes.data, expected.ctypes.data, 0, 3, rows.shape[1], None
        )
        assert np.array_equal(ggml.encode(rows, name, label="t"), expected)
