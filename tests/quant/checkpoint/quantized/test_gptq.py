"""GPTQ checkpoints with known values: the floats are restored, or the folder is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.model_file import read_header
from quant.quantize import plan
from quant.quantize.write import open_gguf, write_model
from tests.quant import tiny_checkpoint
from tests.quant.quantized_checkpoint import restored_tensors, write

torch = pytest.importorskip(
    "torch", reason="torch is not installed: safetensors has no int32 writer here"
)
NAMES = (
    "model.layers.0.mlp.up_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.gate_proj",
)
GROUP = 16


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [n, m] into int32 words [n / codes per word, m], the first code in the lowest
    bits.
    """
    count = 32 // bits
    packed = np.zeros((codes.shape[0] // count, codes.shape[1]), np.uint32)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            packed[i // count, j] |= np.uint32(int(codes[i, j]) << (bits * (i % count)))
    return packed.view(np.int32)


def random_matrix(
    shape: tuple[int, int],
    bits: int,
    form: str,
    order: bool,
    sym: bool,
    random: np.random.Generator,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a random GPTQ matrix: its stored tensors by name ending, and its floats [outputs,
    inputs].

    `order` assigns the inputs to groups at random (desc_act), `sym` sets all zero points to the
    middle code, and `form` is the checkpoint format, "gptq" or "gptq_v2".
    """
    outputs, inputs = shape
    groups = inputs // GROUP
    codes = random.integers(0, 2**bits, (inputs, outputs))
    zeros = (
        np.full((groups, outputs), 2 ** (bits - 1))
        if sym
        else random.integers(1, 2**bits, (groups, outputs))
    )
    scales = random.uniform(0.01, 0.02, (groups, outputs)).astype(np.float16)
    g_idx = np.arange(inputs) // GROUP
    if order:
        g_idx = random.permutation(g_idx)
    values = np.zeros((outputs, inputs), np.float32)
    for i in range(inputs):
        for j in range(outputs):
            group = g_idx[i]
            values[j, i] = np.float32(scales[group, j]) * np.float32(codes[i, j] - zeros[group, j])
    stored = {
        "qweight": pack_words(codes, bits),
        "qzeros": pack_words((zeros - (form == "gptq")).T, bits).T,
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }
    return stored, values


def write_checkpoint(
    stories: Path,
    target: Path,
    *,
    bits: int = 4,
    form: str = "gptq",
    order: bool = False,
    sym: bool = True,
    settings: dict[str, Any] | None = None,
    change: dict[str, np.ndarray | None] | None = None,
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write the stories260K checkpoint with the matrices NAMES as GPTQ.

    Returns the folder and the floats of these matrices by name. `change` replaces stored tensors
    of the first matrix; None removes the tensor.
    """
    random = np.random.default_rng(bits)
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    expected = {}
    for name in NAMES:
        shape = tensors.pop(f"{name}.weight").shape
        shape = (
            shape[0] // 16 * 16,
            shape[1],
        )  # packed words need a multiple of 16 outputs, and 172 is none
        stored, expected[f"{name}.weight"] = random_matrix(shape, bits, form, order, sym, random)
        stored |= (change or {}) if name == NAMES[0] else {}
        tensors |= {
            f"{name}.{ending}": array for ending, array in stored.items() if array is not None
        }
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": order,
        "sym": sym,
    }
    config |= {"checkpoint_format": form} if form != "gptq" else {}
    torch_tensors = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    return write(stories, target, torch_tensors, config | (settings or {})), expected


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("form", "order", "sym"),
    [("gptq", False, True), ("gptq", True, False), ("gptq_v2", True, False)],
)
def test_floats_are_restored(
    bits: int, form: str, order: bool, sym: bool, stories: Path, tmp_path: Path
) -> None:
    path, expected = write_checkpoint(
        stories, tmp_path / "gptq", bits=bits, form=form, order=order, sym=sym
    )
    for rows_per_read in (7, 1000):
        restored = restored_tensors(path, rows_per_read)
        assert not any(name.endswith(("qweight", "qzeros", "scales", "g_idx")) for name in restored)
        for name, values in expected.items():
            assert np.array_equal(restored[name], values), name


def test_without_g_idx_groups_are_consecutive(stories: Path, tmp_path: Path) -> None:
    path, expected = write_checkpoint(stories, tmp_path / "gptq", change={"g_idx": None})
    restored = restored_tensors(path)
    assert all(np.array_equal(restored[name], values) for name, values in expected.items())


def test_band_size_does_not_change_the_values(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = write_checkpoint(stories, tmp_path / "gptq", order=True)
    monkeypatch.setattr("quant.checkpoint.quantized.gptq.BAND_CODES", 16)
    restored = restored_tensors(path)
    assert all(np.array_equal(restored[name], values) for name, values in expected.items())


def test_group_size_may_exceed_the_matrix(stories: Path, tmp_path: Path) -> None:
    one_group: dict[str, np.ndarray | None] = {
        "g_idx": None,
        "scales": np.full((1, 160), 0.5, np.float16),
    }
    one_group["qzeros"] = np.full((1, 20), 0x77777777, np.int32)
    paths = [
        write_checkpoint(stories, tmp_path / str(n), settings={"group_size": n}, change=one_group)[
            0
        ]
        for n in (-1, 64, 10**30)
    ]
    restored = [restored_tensors(path)[f"{NAMES[0]}.weight"] for path in paths]
    assert np.array_equal(restored[0], restored[1])
    assert np.array_equal(restored[0], restored[2])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_that_gptqmodel_decremented_per_word_are_restored(
    bits: int, stories: Path, tmp_path: Path
) -> None:
    """GPTQModel subtracts 1 from all zero points of a word at once (convert_gptq_v2_to_v1_format).

    A zero point of 0 therefore borrows from the next code. Adding 1 to each code of the word
    restores all of them.
    """
    random, shape = np.random.default_rng(bits), (160, 64)
    stored, _ = random_matrix(shape, bits, "gptq_v2", True, False, random)
    zeros = random.integers(0, 2**bits, (64 // GROUP, 160))
    zeros[:, ::3] = 0
    ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    words_v2 = pack_words(zeros.T, bits).T.copy().view(np.uint32)
    change = {**stored, "qzeros": (words_v2 - ones).view(np.int32)}
    settings = {
        "bits": bits,
        "checkpoint_format": "gptq",
        "sym": False,
        "meta": {"quantizer": ["gptqmodel:5.6.0"]},
    }
    path, _ = write_checkpoint(
        stories, tmp_path / "v1", bits=bits, settings=settings, change=change
    )
    v2_tensors = {**change, "qzeros": words_v2.view(np.int32)}
    v2_path, _ = write_checkpoint(
        stories,
        tmp_path / "v2",
        bits=bits,
        settings={"checkpoint_format": "gptq_v2"},
        change=v2_tensors,
    )
    name = f"{NAMES[0]}.weight"
    assert np.array_equal(restored_tensors(path)[name], restored_tensors(v2_path)[name])


def test_converted_file_names_the_source_method(stories: Path, tmp_path: Path) -> None:
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    stored, values = random_matrix((64, 64), 4, "gptq", True, False, np.random.default_rng(0))
    del tensors["model.layers.2.self_attn.o_proj.weight"]
    tensors |= {
        f"model.layers.2.self_attn.o_proj.{ending}": array for ending, array in stored.items()
    }
    torch_tensors = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    path = write(
        stories,
        tmp_path / "gptq",
        torch_tensors,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    )
    source = checkpoint_source.open_checkpoint(path)
    assert any(
        "(GPTQ)" in note and "quantizing them again adds to their error" in note
        for note in source.notes
    )
    write_model(plan.plan_quantization(source, "F32"), tmp_path / "x.gguf")
    header = read_header.read_header(tmp_path / "x.gguf")
    assert header.metadata["llmcli.convert.source_method"] == "gptq"
    converted = open_gguf(tmp_path / "x.gguf")
    weight = next(
        weight for weight in converted.weights if weight.name == "blk.2.attn_output.weight"
    )
    assert np.array_equal(weight.read(0, 64).view(np.float32), values)


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"bits": 3}, {}, "GPTQ with 3 bits is not supported; 2, 4 and 8 are"),
        ({"bits": "4"}, {}, "GPTQ with '4' bits"),
        ({"bits": 4.0}, {}, "GPTQ with 4.0 bits"),
        ({"bits": 8}, {}, "these are not 8-bit codes"),
        ({"checkpoint_format": "marlin"}, {}, "the GPTQ format 'marlin' is not supported"),
        ({"checkpoint_format": ["x"]}, {}, "is not supported"),
        ({"is_marlin_format": True}, {}, "GPTQ with is_marlin_format"),
        (
            {"group_size": None},
            {"g_idx": None},
            "group_size is None, and .*up_proj.qweight has no g_idx",
        ),
        ({"group_size": 8}, {"g_idx": None}, "uses groups beyond its 4 scales"),
        ({}, {"g_idx": np.full(64, 4, np.int32)}, "uses groups beyond its 4 scales"),
        ({}, {"g_idx": np.full(64, -1, np.int32)}, "uses groups"),
        ({}, {"g_idx": np.zeros(63, np.int32)}, "not a group for each of 64 inputs"),
        ({}, {"qzeros": None}, "up_proj.qweight has no model.layers.0.mlp.up_proj.qzeros"),
        ({}, {"scales": np.ones((4, 8), np.float16)}, "these are not 4-bit codes"),
        ({}, {"weight": np.ones((160, 64), np.float32)}, "is stored both as floats and as codes"),
        ({}, {"channel_scale": np.ones(64, np.float32)}, "up_proj.channel_scale is unknown"),
    ],
)
def test_unsupported_or_inconsistent_checkpoint_is_refused(
    settings: dict[str, Any], change: dict[str, Any], message: str, stories: Path, tmp_path: Path
) -> None:
    path, _ = write_checkpoint(stories, tmp_path / "odd", settings=settings, change=change)
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(path)
    assert re.search(message, str(caught.value)), caught.value


def test_settings_are_read_from_quantize_config_json(stories: Path, tmp_path: Path) -> None:
    path, expected = write_checkpoint(stories, tmp_path / "gptq")
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"up_proj\.qweight is unknown"):
        checkpoint_source.open_checkpoint(path)
    del settings["quant_method"]
    (path / "quantize_config.json").write_text(json.dumps(settings))
    assert all(
        np.array_equal(restored_tensors(path)[name], values) for name, values in expected.items()
    )
    (path / "quantize_config.json").rename(path / "quant_config.json")
    with pytest.raises(UserError, match="not 4-bit codes"):  # this file is AWQ's
        checkpoint_source.open_checkpoint(path)


def test_settings_without_codes_are_ignored(stories: Path, tmp_path: Path) -> None:
    path = shutil.copytree(stories, tmp_path / "floats")
    (path / "quant_config.json").write_text('{"zero_point": true}')
    before = checkpoint_source.open_checkpoint(path)
    tiny_checkpoint.edit(
        path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}
    )
    after = checkpoint_source.open_checkpoint(path)
    assert (after.entries, after.notes) == (before.entries, before.notes)
