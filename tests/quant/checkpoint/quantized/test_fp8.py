"""FP8 checkpoints written with torch: the values equal those of torch, or the folder is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.quantized.base import float8_values
from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.model_file import load_checks, read_header
from quant.quantize import plan
from quant.quantize.write import write_model
from tests.quant import tiny_checkpoint
from tests.quant.quantized_checkpoint import restored_tensors, write

torch = pytest.importorskip(
    "torch", reason="torch is not installed: eight-bit floats have no oracle"
)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_all_256_codes_decode_as_in_torch(dtype: str) -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    name = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}[
        dtype
    ]
    assert np.array_equal(float8_values(name), theirs, equal_nan=True)


def quantize_blocks(weight: Any, size: tuple[int, int], dtype: Any) -> tuple[Any, Any, Any]:
    """Quantize a matrix in blocks of `size` rows and columns, and return (codes, scales, values).

    The last blocks may be partial. `values` are the codes times the scales, as F32.
    """
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // size[0]), -(-columns // size[1]))
    codes, values = torch.zeros(weight.shape, dtype=dtype), torch.zeros(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * size[0], (i + 1) * size[0]), slice(j * size[1], (j + 1) * size[1])
            scales[i, j] = weight[block].abs().max() / torch.finfo(dtype).max
            codes[block] = (weight[block] / scales[i, j]).to(dtype)
            values[block] = codes[block].float() * scales[i, j]
    return codes, scales, values


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("ending", "size"),
    [("weight_scale_inv", (48, 40)), ("weight_scale", (512, 512)), ("weight_scale", (1, 512))],
    ids=["blocks", "tensor", "rows"],
)
def test_restored_values_are_codes_times_scales(
    dtype: str, ending: str, size: tuple[int, int], stories: Path, tmp_path: Path
) -> None:
    tensors: dict[str, Any] = {}
    expected = {}
    for name, array in tiny_checkpoint.read(stories / "model.safetensors").items():
        weight = torch.from_numpy(array.copy())
        if weight.dim() == 1 or "embed" in name:
            tensors[name] = weight.bfloat16()
            continue
        codes, scales, expected[name] = quantize_blocks(weight, size, getattr(torch, dtype))
        scale_name = name.removesuffix("weight") + ending
        tensors |= {name: codes, scale_name: scales[0, 0] if size == (512, 512) else scales}
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    settings = {
        "quant_method": "fp8",
        "weight_block_size": list(size) if ending.endswith("inv") else None,
    }
    folder = write(stories, tmp_path / "fp8", tensors, settings)
    restored = restored_tensors(folder)
    assert expected.keys() <= restored.keys()
    for name, values in expected.items():
        assert np.array_equal(restored[name], values.numpy()), name


def test_block_size_may_exceed_the_matrix(stories: Path, tmp_path: Path) -> None:
    scale = torch.full((1, 1), 0.5)
    small, huge = (
        {"quant_method": "fp8", "weight_block_size": [size, size]} for size in (512, 10**30)
    )
    restored = [
        restored_tensors(
            write_checkpoint(
                stories, tmp_path / str(len(str(settings))), settings, weight_scale_inv=scale
            )
        )
        for settings in (small, huge)
    ]
    assert all(np.array_equal(restored[0][name], values) for name, values in restored[1].items())


def test_stacked_experts_have_a_scale_per_block(tmp_path: Path) -> None:
    from quant.checkpoint import dequantize
    from quant.checkpoint.config import CheckpointConfig
    from quant.checkpoint.safetensors import load_tensors
    from quant.checkpoint.tensor_views import read_floats, row_count

    experts = [
        quantize_blocks(torch.randn(70, 50), (32, 32), torch.float8_e4m3fn) for _ in range(3)
    ]
    codes, scales, values = (torch.stack([expert[i] for expert in experts]) for i in range(3))
    from safetensors.torch import save_file

    save_file(
        {"e.gate_up_proj": codes, "e.gate_up_proj_scale_inv": scales},
        tmp_path / "model.safetensors",
    )
    config = CheckpointConfig(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
        "config.json",
    )
    restored = dequantize.restore_floats(
        CheckpointFolder(tmp_path), config, load_tensors(CheckpointFolder(tmp_path))
    ).tensors
    assert list(restored) == ["e.gate_up_proj"]
    tensor = restored["e.gate_up_proj"]
    assert np.array_equal(read_floats(tensor).reshape(3, 70, 50), values.numpy())
    row_spans = [
        read_floats(tensor, first, min(first + 33, 210))
        for first in range(0, row_count(tensor), 33)
    ]
    assert np.array_equal(np.concatenate(row_spans).reshape(3, 70, 50), values.numpy())


def write_checkpoint(stories: Path, folder: Path, settings: dict[str, Any], **changes: Any) -> Path:
    """Write the stories260K checkpoint with one matrix as FP8, and return the folder.

    `changes` replace tensors of that matrix by name; None removes the tensor.
    """
    tensors = {
        name: torch.from_numpy(a.copy())
        for name, a in tiny_checkpoint.read(stories / "model.safetensors").items()
    }
    name = "model.layers.0.mlp.up_proj"
    codes, scales, _ = quantize_blocks(tensors[f"{name}.weight"], (128, 128), torch.float8_e4m3fn)
    matrix_tensors = {"weight": codes, "weight_scale_inv": scales} | changes
    tensors |= {
        f"{name}.{key}": value for key, value in matrix_tensors.items() if value is not None
    }
    return write(stories, folder, tensors, settings)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (BLOCKS, {"weight_scale_inv": None}, "up_proj.weight is stored as F8_E4M3"),
        (
            {"quant_method": "fp8"},
            {},
            r"weight_scale_inv is \[2, 1\], which does not fit .*up_proj.weight \[172, 64\]",
        ),
        (BLOCKS | {"weight_block_size": [64, 64]}, {}, "does not fit .* in blocks of"),
        (BLOCKS | {"weight_block_size": [0, 128]}, {}, "does not fit"),
        (BLOCKS | {"weight_block_size": "x"}, {}, "does not fit"),
        (
            BLOCKS,
            {"weight_scale_inv": torch.ones(2, 1, dtype=torch.int32)},
            "is stored as I32, not as floats",
        ),
        (BLOCKS, {"weight_scale": torch.ones(1)}, "up_proj.weight_scale is unknown"),
        (BLOCKS, {"weight_zero": torch.ones(1)}, "up_proj.weight_zero is unknown"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, {}, "W4A16_AWQ is not supported"),
        ({}, {}, "up_proj.weight_scale_inv is unknown; .*up_proj.weight is stored as F8_E4M3"),
    ],
)
def test_unsupported_or_inconsistent_checkpoint_is_refused(
    settings: dict[str, Any], changes: dict[str, Any], message: str, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(
            write_checkpoint(stories, tmp_path / "odd", settings, **changes)
        )
    assert re.search(message, str(caught.value)), caught.value


def test_values_that_are_not_finite_are_refused_by_tensor_name(
    stories: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(
        stories, tmp_path / "nan", BLOCKS, weight_scale_inv=torch.tensor([[1.0], [float("inf")]])
    )
    with pytest.raises(UserError, match=r"up_proj\.weight contains NaN or infinite values"):
        write_model(
            plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"),
            tmp_path / "x.gguf",
        )
    assert not (tmp_path / "x.gguf").exists()


def test_source_method_is_in_the_notes_and_the_metadata(stories: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(stories, tmp_path / "small-fp8", BLOCKS)
    (folder / "README.md").write_text("---\nbase_model: org/small\n---\n# Small\n")
    source = checkpoint_source.open_checkpoint(folder)
    assert any(
        "already quantized (FP8)" in note and "org/small gives a better file" in note
        for note in source.notes
    )
    write_model(plan.plan_quantization(source, "F16"), tmp_path / "x.gguf")
    header = read_header.read_header(tmp_path / "x.gguf")
    assert header.metadata["llmcli.convert.source_method"] == "fp8"
    load_checks.check_loadable(header)


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("hqq", "HQQ"),
        ("eetq", "EETQ"),
        ("aqlm", "AQLM"),
        ("something-new", "something-new"),
        (7, "unknown"),
    ],
)
def test_other_methods_are_refused_with_the_base_model_in_the_hint(
    method: object, title: str, stories: Path, tmp_path: Path
) -> None:
    tensors = {
        name: torch.from_numpy(a.copy())
        for name, a in tiny_checkpoint.read(stories / "model.safetensors").items()
    }
    codes = torch.zeros((172, 32), dtype=torch.uint8)
    tensors |= {"model.layers.0.mlp.up_proj.weight": codes}
    folder = write(stories, tmp_path / "odd", tensors, {"quant_method": method})
    tiny_checkpoint.edit(folder / "config.json", _name_or_path="org/Whole-7B")
    with pytest.raises(UserError, match=re.escape(f"is quantized ({title})")) as caught:
        checkpoint_source.open_checkpoint(folder)
    assert caught.value.hint == "use the model it was made from: org/Whole-7B"
    (folder / "README.md").write_text("---\nbase_model:\n- other/Parent-7B\n---\n")
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(folder)
    assert caught.value.hint == "use the model it was made from: other/Parent-7B"


@pytest.mark.parametrize("method", ["bitsandbytes", "eetq", "hqq", "quanto", "torchao"])
def test_settings_of_load_time_quantization_are_ignored_if_the_tensors_are_floats(
    method: str, stories: Path, tmp_path: Path
) -> None:
    settings = {"quant_method": method, "load_in_4bit": True}
    source = checkpoint_source.open_checkpoint(
        tiny_checkpoint.copy(stories, tmp_path / "merged", quantization_config=settings)
    )
    assert not any("quantized" in note for note in source.notes)
    assert "llmcli.convert.source_method" not in dict(source.entries)


def test_modelopt_settings_file_is_read(stories: Path, tmp_path: Path) -> None:
    tensors = {
        name: torch.from_numpy(a.copy())
        for name, a in tiny_checkpoint.read(stories / "model.safetensors").items()
    }
    name = "model.layers.0.mlp.up_proj.weight"
    codes, scales, values = quantize_blocks(tensors[name], (512, 512), torch.float8_e4m3fn)
    tensors |= {
        name: codes,
        f"{name}_scale": scales[0, 0],
        name.replace("weight", "input_scale"): torch.ones(()),
    }
    folder = write(stories, tmp_path / "modelopt", tensors, {})
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8"}})
    )
    assert np.array_equal(restored_tensors(folder)[name], values.numpy())
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}})
    )
    with pytest.raises(UserError, match="W4A8_AWQ is not supported; FP8, NVFP4 and MXFP4 are"):
        checkpoint_source.open_checkpoint(folder)


def test_float8_codes_are_not_read_as_floats(stories: Path, tmp_path: Path) -> None:
    from quant.checkpoint import safetensors, tensor_views

    folder = write_checkpoint(stories, tmp_path / "odd", BLOCKS)
    with pytest.raises(UserError, match=r"up_proj\.weight is stored as F8_E4M3"):
        tensor_views.read_floats(
            safetensors.load_tensors(
                CheckpointFolder(folder), safetensors.find_safetensors(folder)
            )["model.layers.0.mlp.up_proj.weight"]
        )
