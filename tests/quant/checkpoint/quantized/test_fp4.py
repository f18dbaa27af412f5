"""NVFP4, MXFP4 and MXFP8 weights of each tool that writes them have known values."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.checkpoint import tensor_views
from quant.checkpoint.quantized.base import float8_values
from quant.convert import checkpoint_source
from quant.errors import DamagedSourceError, UserError
from quant.native import ggml
from quant.quantize.plan import plan_quantization
from tests.quant import tiny_checkpoint
from tests.quant.checkpoint.quantized.stored import Stored, floats, restore
from tests.quant.int4_checkpoint import Table, ZeroFile

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
}


def random_codes(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random codes, two in a byte, and their values as float32 in the given shape."""
    random = np.random.default_rng(len(shape))
    codes = random.integers(0, 16, shape)
    values = np.zeros(shape, np.float32)
    for index in np.ndindex(*shape):
        values[index] = LEVELS[codes[index] % 8] * (-1 if codes[index] >= 8 else 1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8), values


def random_nvfp4(
    *shape: int, divide: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales, the tensor's scale and the values of a random weight. The scale of the
    tensor divides the other scales, or multiplies them.
    """
    codes, values = random_codes(*shape)
    random = np.random.default_rng(1)
    scales = random.integers(1, 127, (*shape[:-1], shape[-1] // 16)).astype(np.uint8)
    tensor_scale = np.float32(1234.5 if divide else 0.000321)
    for index in np.ndindex(*shape):
        scale = float8_values("F8_E4M3")[scales[(*index[:-1], index[-1] // 16)]]
        scale = scale / tensor_scale if divide else scale * tensor_scale
        values[index] = values[index] * scale
    return codes, scales, np.array(tensor_scale), values


@pytest.mark.parametrize("shape", [(24, 96), (3, 8, 64)])
def test_nvfp4_of_modelopt_is_widened(shape: tuple[int, ...]) -> None:
    codes, scales, tensor_scale, values = random_nvfp4(*shape, divide=False)
    stored = Stored(
        {
            "a.weight": codes,
            "a.weight_scale": ("F8_E4M3", scales),
            "a.weight_scale_2": tensor_scale,
            "a.input_scale": np.float32(1),
            "a.k_scale": np.float32(1),
            "b.weight": np.ones((2, 2), np.float32),
        }
    )
    result = restore(MODELOPT, stored)
    assert list(result) == ["a.weight", "b.weight"] and not stored.reads
    assert np.array_equal(floats(result["a.weight"], 5), values)


def test_a_scale_of_each_expert_is_applied_to_its_matrix() -> None:
    codes, scales, tensor_scale, values = random_nvfp4(3, 8, 64, divide=False)
    factors = np.array([1, 2, 4], np.float32)
    stored = Stored(
        {
            "a.weight": codes,
            "a.weight_scale": ("F8_E4M3", scales),
            "a.weight_scale_2": tensor_scale * factors,
        }
    )
    result = floats(restore(MODELOPT, stored)["a.weight"], 5)
    assert np.array_equal(result, values * factors[:, None, None])


def test_formats_may_be_mixed_in_one_checkpoint_of_modelopt() -> None:
    codes, scales, tensor_scale, values = random_nvfp4(24, 96, divide=False)
    mx_codes, mx_values = random_codes(4, 64)
    stored = Stored(
        {
            "a.weight": codes,
            "a.weight_scale": ("F8_E4M3", scales),
            "a.weight_scale_2": tensor_scale,
            "b.weight": ("F8_E4M3", np.full((4, 8), 0x40, np.uint8)),
            "b.weight_scale": np.array(0.5, np.float32),
            "c.weight": mx_codes,
            "c.weight_scale": np.full((4, 2), 128, np.uint8),
        }
    )
    result = restore(MODELOPT | {"quant_algo": "MIXED_PRECISION"}, stored)
    assert np.array_equal(floats(result["a.weight"]), values)
    assert (floats(result["b.weight"]) == 1).all()
    assert result["c.weight"].dtype == "MXFP4"
    assert np.array_equal(floats(result["c.weight"]), mx_values * 2)


@pytest.mark.parametrize("settings", [COMPRESSED, AUTO_ROUND])
def test_nvfp4_of_compressed_tensors_is_widened(settings: dict[str, Any]) -> None:
    codes, scales, tensor_scale, values = random_nvfp4(24, 96, divide=True)
    stored = Stored(
        {
            "a.weight_packed": codes,
            "a.weight_scale": ("F8_E4M3", scales),
            "a.weight_global_scale": tensor_scale,
            "a.input_global_scale": np.float32(1),
            "b.weight": np.ones((2, 2), np.float32),
        }
    )
    result = restore(settings, stored)
    assert sorted(result) == ["a.weight", "b.weight"] and not stored.reads
    assert np.array_equal(floats(result["a.weight"], 5), values)


@pytest.mark.parametrize(
    ("settings", "codes_name"),
    [
        (MODELOPT | {"quant_algo": "MXFP4"}, "a.weight"),
        (COMPRESSED | {"format": "mxfp4-pack-quantized"}, "a.weight_packed"),
        (AUTO_ROUND, "a.weight_packed"),
        (QUARK, "a.weight"),
    ],
)
@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_mxfp4_becomes_blocks_of_ggml(
    settings: dict[str, Any], codes_name: str, dtype: str
) -> None:
    codes, values = random_codes(24, 96)
    exponents = np.random.default_rng(2).integers(0, 253, (24, 3)).astype(np.uint8)
    stored = Stored({codes_name: codes, "a.weight_scale": (dtype, exponents)})
    result = restore(settings, stored)
    assert list(result) == ["a.weight"] and not stored.reads
    assert (result["a.weight"].dtype, result["a.weight"].shape) == ("MXFP4", (24, 96))
    expected = np.ldexp(values, np.repeat(exponents.astype(int) - 127, 32, axis=1))
    assert np.array_equal(floats(result["a.weight"], 5), expected)


@pytest.mark.parametrize(
    "settings",
    [MODELOPT | {"quant_algo": "MXFP8"}, COMPRESSED | {"format": "mxfp8-quantized"}],
)
@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_mxfp8_is_widened(settings: dict[str, Any], dtype: str) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 127, (6, 80)).astype(np.uint8)
    exponents = random.integers(100, 140, (6, 3)).astype(np.uint8)
    stored = Stored({"a.weight": ("F8_E4M3", codes), "a.weight_scale": (dtype, exponents)})
    expected = np.zeros((6, 80), np.float32)
    for i, j in np.ndindex(6, 80):
        expected[i, j] = float8_values("F8_E4M3")[codes[i, j]] * 2.0 ** (
            int(exponents[i, j // 32]) - 127
        )
    assert np.array_equal(floats(restore(settings, stored)["a.weight"], 4), expected)


def test_rows_are_read_with_their_own_scales_only() -> None:
    codes, spans = np.full((3, 8, 64), 0x40, np.uint8), []
    exponents = np.arange(100, 148).astype(np.uint8).reshape(3, 8, 2)
    stored = Stored({"a.weight": ("F8_E4M3", codes), "a.weight_scale": exponents})
    scale = stored.tensors["a.weight_scale"]

    def read(first: int, last: int) -> np.ndarray:
        spans.append((first, last))
        return scale.read(first, last)

    stored.tensors["a.weight_scale"] = replace(scale, read=read)
    weight = restore(MODELOPT | {"quant_algo": "MXFP8"}, stored)["a.weight"]
    values = tensor_views.read_floats(weight, 5, 9)
    assert spans == [(5, 9)]
    assert np.array_equal(
        values[:, ::32], np.ldexp(2.0, exponents.reshape(24, 2)[5:9].astype(int) - 127)
    )


def test_mxfp4_stacks_of_any_model_become_blocks_of_ggml() -> None:
    codes, values = random_codes(2, 6, 64)
    stored = Stored(
        {
            "experts.down_proj_blocks": codes.reshape(2, 6, 2, 16),
            "experts.down_proj_scales": np.full((2, 6, 2), 127, np.uint8),
        }
    )
    result = restore({"quant_method": "mxfp4"}, stored)
    assert np.array_equal(floats(result["experts.down_proj"], 5), values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MODELOPT | {"quant_algo": "W4A16_AWQ"}, "W4A16_AWQ is not supported; FP8, NVFP4"),
        (COMPRESSED | {"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized is not supported"),
        (
            QUARK | {"layer_quant_config": {"lm_head": {"weight": [{"dtype": "int4"}]}}},
            "Quark with int4 is not supported; fp4, fp8_e4m3, fp8_e5m2 are",
        ),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        restore(settings, Stored({}))


def test_a_scale_that_is_missing_or_does_not_fit_is_refused() -> None:
    codes, scales, _, _ = random_nvfp4(24, 96, divide=False)
    arrays = {"a.weight": codes, "a.weight_scale": ("F8_E4M3", scales)}
    with pytest.raises(UserError, match=r"a.weight_scale_2 is F32 \[3\], not a scale of a.weight"):
        restore(MODELOPT, Stored(arrays | {"a.weight_scale_2": np.ones(3, np.float32)}))
    for settings, name in ((MODELOPT, "a.weight"), (COMPRESSED, "a.weight_packed")):
        stored = Stored({name: codes, "a.weight_scale": ("F8_E4M3", scales)})
        with pytest.raises(UserError, match=f"{name} is NVFP4 without the scale of the tensor"):
            restore(settings, stored)
    # codes without scales of their size stay, and the converter reports them
    for wrong in (scales[:, :5], scales[:12]):
        stored = Stored(arrays | {"a.weight_scale": ("F8_E4M3", wrong)})
        assert restore(MODELOPT, stored) == stored.tensors


def test_values_that_are_not_finite_are_refused_by_tensor_name() -> None:
    codes, scales, tensor_scale, _ = random_nvfp4(24, 96, divide=False)
    scales[3, 1] = 127
    arrays = {"a.weight": codes, "a.weight_scale": ("F8_E4M3", scales)}
    result = restore(MODELOPT, Stored(arrays | {"a.weight_scale_2": tensor_scale}))
    with pytest.raises(DamagedSourceError, match=r"a\.weight contains NaN"):
        floats(result["a.weight"])


def write_llama(stories: Path, folder: Path, settings: dict[str, Any], tables: Table) -> Path:
    """Write the stories260K checkpoint with some tensors replaced. `tables`: the dtype, the shape
    and the bytes of the new tensors; the matrices that they replace are left out.
    """
    replaced = {re.sub(r"weight_.*", "weight", name) for name in tables}
    kept: Table = {
        name: ("F32", array.shape, array.astype(np.float32).tobytes())
        for name, array in tiny_checkpoint.read(stories / "model.safetensors").items()
        if name not in replaced
    }
    tiny_checkpoint.copy(stories, folder, quantization_config=settings)
    file = folder / "model.safetensors"
    file.write_bytes(ZeroFile(file, kept | tables).content())
    return folder


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_a_dense_llama_with_some_layers_in_fp4_is_converted(
    kind: str, stories: Path, tmp_path: Path
) -> None:
    """The rows of q_proj are reordered, also in blocks. Other layers stay floats."""
    packed: Table = {}
    plain: Table = {}
    for name in ("q_proj", "o_proj"):
        weight = f"model.layers.1.self_attn.{name}.weight"
        if kind == "mxfp4":
            codes, values = random_codes(64, 64)
            scales, dtype = np.full((64, 2), 120, np.uint8), "U8"
            values = np.ldexp(values, -7)
        else:
            codes, scales, tensor_scale, values = random_nvfp4(64, 64, divide=True)
            dtype = "F8_E4M3"
            packed[f"{weight}_global_scale"] = ("F32", (1,), tensor_scale.tobytes())
        packed[f"{weight}_packed"] = ("U8", codes.shape, codes.tobytes())
        packed[f"{weight}_scale"] = (dtype, scales.shape, scales.tobytes())
        plain[weight] = ("F32", (64, 64), values.tobytes())
    settings = COMPRESSED | {"format": f"{kind}-pack-quantized", "ignore": ["lm_head"]}
    ours = checkpoint_source.open_checkpoint(
        write_llama(stories, tmp_path / "packed", settings, packed)
    )
    floats_source = checkpoint_source.open_checkpoint(
        write_llama(stories, tmp_path / "plain", {}, plain)
    )
    for weight, expected in zip(ours.weights, floats_source.weights, strict=True):
        data = ggml.decode(
            weight.read(0, weight.rows), weight.type, weight.columns, label=weight.name
        )
        assert weight.name == expected.name
        assert np.array_equal(data, expected.read(0, weight.rows).view(np.float32)), weight.name
    types = {weight.name: weight.type for weight in ours.weights}
    expected_type = "MXFP4" if kind == "mxfp4" else "F32"
    assert types["blk.1.attn_q.weight"] == types["blk.1.attn_output.weight"] == expected_type
    assert types["blk.0.attn_q.weight"] == "F32"
    plan = plan_quantization(ours, "Q8_0")
    new_types = {step.weight.name: step.type for step in plan.steps}
    assert new_types["blk.1.attn_q.weight"] == ("MXFP4" if kind == "mxfp4" else "Q8_0")
    assert new_types["blk.0.attn_q.weight"] == "Q8_0"
    assert any("already quantized" in note for note in plan.notes) == (kind == "nvfp4")
    assert any("2 tensors stay MXFP4" in note for note in plan.notes) == (kind == "mxfp4")
