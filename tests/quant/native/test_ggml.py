"""libggml through ctypes, compared with its names and the gguf package's dequantizer."""

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


def test_our_table_of_types_is_the_librarys() -> None:
    lib = ggml.open_library()
    lib.ggml_type_name.restype = ctypes.c_char_p
    assert {n: lib.ggml_type_name(n).decode().upper() for n in ggml.TYPE_NAMES} == ggml.TYPE_NAMES


@pytest.mark.parametrize("name", sorted(set(QUANTIZED) - {"Q1_0", "Q2_0"}))
def test_decoding_gives_what_the_gguf_package_reads(name: str) -> None:
    codes = ggml.encode(
        rows(), name, label="t", importance=ggml.Importance(np.ones((1, 512), np.float32), 24)
    )
    ours = ggml.decode(codes, name, 512, label="t")
    theirs = gguf.dequantize(codes, gguf.GGMLQuantizationType[name])
    assert np.array_equal(ours, theirs)


def test_every_half_is_widened_to_its_own_number() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    for row in (halves, halves[5:-2]):
        wide = ggml.decode(row.view(np.uint8), "F16", row.size, label="all")[0]
        known = row.view(np.float16).astype(np.float32)
        number = ~np.isnan(known)
        assert np.isnan(wide[~number]).all()
        assert (wide[number].view(np.uint32) == known[number].view(np.uint32)).all()


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_encoding_gives_what_the_gguf_package_writes(name: str) -> None:
    ours = ggml.encode(rows(), name, label="t")
    theirs = gguf.quantize(rows(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(ours.reshape(-1), np.ascontiguousarray(theirs).view(np.uint8).reshape(-1))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_1", "IQ4_NL"])
def test_every_matrix_of_a_stack_is_weighed_by_its_own_vector(name: str) -> None:
    vectors = np.random.default_rng(2).exponential(1, (3, 512)).astype(np.float32)
    whole = ggml.encode(rows(), name, label="t", importance=ggml.Importance(vectors, 8))
    each = [
        ggml.encode(
            rows()[8 * i : 8 * i + 8],
            name,
            label="t",
            importance=ggml.Importance(vectors[i : i + 1], 8),
        )
        for i in range(3)
    ]
    assert np.array_equal(whole, np.concatenate(each))
    within = ggml.Importance(vectors, 8).after(5)
    assert np.array_equal(whole[5:], ggml.encode(rows()[5:], name, label="t", importance=within))
    assert not np.array_equal(whole, ggml.encode(rows(), name, label="t"))


def test_the_types_ggml_aborts_on_without_an_imatrix_are_known() -> None:
    lib = ggml.open_library()
    found = {
        name for name in QUANTIZED if lib.ggml_quantize_requires_imatrix(ggml.TYPE_NUMBERS[name])
    }
    assert found == TYPES_ABORTING_WITHOUT_IMATRIX


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    broken = rows()
    broken[7, 300] = bad
    with pytest.raises(UserError, match=r"blk\.3\.ffn_up\.weight contains NaN or infinite"):
        ggml.encode(broken, "Q4_K", label="blk.3.ffn_up.weight")


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_what_is_copied_is_looked_at_too(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    codes = ggml.encode(rows(), name, label="t")
    ggml.require_finite(codes, name, label="t")
    end = {"F32": b"\0\0\xc0\x7f", "F16": b"\0\x7c", "BF16": b"\x80\xff"}.get(name, b"\0\x7e")
    codes[7, : len(end)] = np.frombuffer(
        end, np.uint8
    )  # NaN, infinity, -infinity, a NaN for a block's scale
    with pytest.raises(UserError, match=r"blk\.3\.ffn_up\.weight contains NaN or infinite"):
        ggml.require_finite(codes, name, label="blk.3.ffn_up.weight")


def test_a_value_outside_of_f16_is_refused_and_fits_bf16(capfd: pytest.CaptureFixture[str]) -> None:
    large = rows()
    large[0, 0] = 1e6
    with pytest.raises(UserError, match="does not fit into F16"):
        ggml.encode(large, "F16", label="t")
    codes = ggml.encode(large, "BF16", label="t")
    assert ggml.decode(codes, "BF16", 512, label="t")[0, 0] == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("name", ["IQ3_S", "IQ3_XXS", "IQ2_S", "Q2_K", "Q4_0"])
def test_values_too_large_for_a_search_are_refused_before_it_could_abort(name: str) -> None:
    large = rows()
    large[3, 7] = -1e30
    with pytest.raises(UserError, match=f"blk.3.x does not fit into {name}"):
        ggml.encode(large, name, label="blk.3.x")


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ1_S", "IQ3_S", "Q4_K", "Q5_1"])
def test_an_importance_too_large_for_a_search_is_refused_before_it_could_abort(name: str) -> None:
    vectors = np.ones((3, 512), np.float32)
    vectors[2, 5] = 3e38
    with pytest.raises(UserError, match=r"the importance of blk.3.x reaches 3e\+38"):
        ggml.encode(rows(), name, label="blk.3.x", importance=ggml.Importance(vectors, 8))


def test_what_needs_no_search_may_be_large() -> None:
    for name in ("MXFP4", "BF16", "F32"):
        large = rows() * np.float32(1e30)
        codes = ggml.encode(
            large, name, label="t", importance=ggml.Importance(np.ones((1, 512), np.float32), 24)
        )
        assert np.allclose(ggml.decode(codes, name, 512, label="t"), large, rtol=0.3, atol=1e29)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_our_encoders_choose_ggmls_bytes(name: str) -> None:
    """Of ordinary weights and odd ones: flat groups, outliers, one sign, tiny, huge; an odd number
    of superblocks.
    """
    if ggml._encoder(name) is None:
        pytest.skip("this build of llama.cpp has no encoders of ours: they are for x86-64 and GCC")
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
