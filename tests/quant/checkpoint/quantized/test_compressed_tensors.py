"""compressed-tensors checkpoints with known values: the floats are restored, or it is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.errors import UserError
from tests.quant import tiny_checkpoint
from tests.quant.checkpoint.quantized.stored import Stored, floats, pack_bit_stream, restore
from tests.quant.quantized_checkpoint import restored_tensors, write

torch = pytest.importorskip(
    "torch", reason="torch is not installed: safetensors has no int32 writer here"
)
NAME = "model.layers.0.mlp.down_proj.weight"
SHAPE = (64, 172)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [n, m] into int32 words [n, ceil(m / codes per word)].

    No code crosses a word boundary, and the last word may be partly empty.
    """
    count = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // count)), np.uint32)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            words[i, j // count] |= np.uint32(int(codes[i, j]) << (bits * (j % count)))
    return words.view(np.int32)


def random_packed_matrix(
    bits: int, groups: int, zeros: str = "", order: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a random packed matrix: its stored tensors by name ending, and their float values.

    `groups` is the number of scales per row. `zeros` says how zero points are stored: "" (none),
    "packed" or "plain". `order` assigns the columns to groups at random.
    """
    random = np.random.default_rng(bits)
    rows, columns = SHAPE
    middle = 2 ** (bits - 1)
    codes = random.integers(-middle, middle, SHAPE)
    scale = random.uniform(0.01, 0.02, (rows, groups)).astype(np.float16)
    zero = (
        random.integers(-middle, middle, (rows, groups)) if zeros else np.zeros((rows, groups), int)
    )
    g_idx = np.arange(columns) // -(-columns // groups)
    if order:
        g_idx = random.permutation(g_idx)
    values = np.zeros(SHAPE, np.float32)
    for i in range(rows):
        for j in range(columns):
            group = g_idx[j]
            values[i, j] = np.float32(codes[i, j] - zero[i, group]) * np.float32(scale[i, group])
    stored = {
        "_packed": pack_words(codes + middle, bits),
        "_scale": scale,
        "_shape": np.array(SHAPE, np.int64),
        "_g_idx": g_idx.astype(np.int32) if order else None,
        "_zero_point": {
            "": None,
            "packed": pack_words((zero + middle).T, bits).T,
            "plain": zero.astype(np.int8),
        }[zeros],
    }
    return {ending: array for ending, array in stored.items() if array is not None}, values


def settings(form: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "type": "int"} | weights, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


def write_checkpoint(
    stories: Path, target: Path, config: dict[str, Any], stored: dict[str, Any]
) -> Path:
    """Write the stories260K checkpoint with the matrix NAME replaced by the tensors `stored`.

    `stored` maps the ending after NAME to an array or torch tensor. Returns the new folder.
    """
    tensors: dict[str, Any] = dict(tiny_checkpoint.read(stories / "model.safetensors"))
    del tensors[NAME]
    tensors |= {NAME + ending: value for ending, value in stored.items()}
    return write(
        stories,
        target,
        {
            n: torch.as_tensor(np.array(v) if isinstance(v, np.ndarray) else v)
            for n, v in tensors.items()
        },
        config,
    )


@pytest.mark.parametrize(
    ("bits", "groups", "zeros", "order"),
    [
        (4, 4, "", False),
        (4, 1, "", False),
        (4, 4, "packed", False),
        (4, 4, "plain", False),
        (4, 4, "packed", True),
        (8, 4, "", True),
        (8, 1, "packed", False),
        (3, 4, "packed", False),
        (2, 2, "", False),
        (6, 1, "", False),
    ],
)
def test_packed_codes_are_restored_as_floats(
    bits: int, groups: int, zeros: str, order: bool, stories: Path, tmp_path: Path
) -> None:
    stored, values = random_packed_matrix(bits, groups, zeros, order)
    config = settings(
        "pack-quantized", num_bits=bits, group_size=-(-SHAPE[1] // groups) if groups > 1 else None
    )
    restored = restored_tensors(write_checkpoint(stories, tmp_path / "packed", config, stored))
    assert np.array_equal(restored[NAME], values)
    assert not any(name.startswith(NAME) and name != NAME for name in restored)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_codes_that_cross_word_boundaries_are_restored(
    bits: int, stories: Path, tmp_path: Path
) -> None:
    """Newer versions of the library leave no bits unused in `pack_to_int32`, so a code may cross
    the boundary of two words. In files of older versions no code does.
    """
    random, middle = np.random.default_rng(bits), 2 ** (bits - 1)
    codes, zeros = random.integers(0, 2**bits, SHAPE), random.integers(0, 2**bits, (64, 4))
    scale = random.uniform(0.01, 0.02, (64, 4)).astype(np.float16)
    stored = {
        "_packed": pack_bit_stream(codes, bits),
        "_scale": scale,
        "_shape": np.array(SHAPE, np.int64),
    }
    config = settings("pack-quantized", num_bits=bits, group_size=43)
    scales = np.repeat(scale.astype(np.float32), 43, axis=1)
    restored = restored_tensors(write_checkpoint(stories, tmp_path / "even", config, stored))
    assert np.array_equal(restored[NAME], (codes - middle).astype(np.float32) * scales)
    stored["_zero_point"] = pack_bit_stream(zeros.T, bits).T
    restored = restored_tensors(write_checkpoint(stories, tmp_path / "zeros", config, stored))
    assert np.array_equal(
        restored[NAME], (codes - np.repeat(zeros, 43, axis=1)).astype(np.float32) * scales
    )


def test_one_scale_for_a_tensor_is_restored(stories: Path, tmp_path: Path) -> None:
    stored, values = random_packed_matrix(4, 1)
    values = values / stored["_scale"].astype(np.float32) * np.float32(0.5)
    stored |= {"_scale": np.array([0.5], np.float32), "_g_idx": np.full(SHAPE[1], -1, np.int32)}
    restored = restored_tensors(
        write_checkpoint(
            stories, tmp_path / "packed", settings("pack-quantized", num_bits=4), stored
        )
    )
    assert np.allclose(restored[NAME], values, rtol=1e-6)


@pytest.mark.parametrize("shape", [(64, 1), (1,), (64, 4)])
@pytest.mark.parametrize("zeros", [False, True])
def test_int8_codes_are_restored(
    shape: tuple[int, ...], zeros: bool, stories: Path, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, SHAPE).astype(np.int8)
    scale = random.uniform(0.01, 0.02, shape).astype(np.float32)
    zero = random.integers(-20, 20, shape).astype(np.int8)
    columns = np.arange(SHAPE[1]) // 43 if shape == (64, 4) else np.zeros(SHAPE[1], int)
    scales = np.broadcast_to(scale, (64, shape[-1]))[:, columns]
    zero_points = (
        np.broadcast_to(zero, (64, shape[-1]))[:, columns].astype(np.float32) if zeros else 0
    )
    stored: dict[str, Any] = {
        "": codes,
        "_scale": scale,
        **({"_zero_point": zero} if zeros else {}),
    }
    config = settings("int-quantized", group_size=43 if shape == (64, 4) else None)
    restored = restored_tensors(write_checkpoint(stories, tmp_path / "int", config, stored))
    assert np.array_equal(restored[NAME], (codes.astype(np.float32) - zero_points) * scales)


@pytest.mark.parametrize(("shape", "block"), [((64, 1), None), ((1,), None), ((3, 6), [24, 32])])
def test_float8_codes_are_restored(
    shape: tuple[int, ...], block: list[int] | None, stories: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    codes = torch.randn(SHAPE).to(torch.float8_e4m3fn)
    scale = torch.rand(shape).bfloat16()
    scales = scale.float()
    if block:
        scales = scales.repeat_interleave(24, 0).repeat_interleave(32, 1)[:64, :172]
    stored = {"": codes, "_scale": scale}
    config = settings(
        "float-quantized",
        type="float",
        block_structure=block,
        strategy="block" if block else "channel",
    )
    path = write_checkpoint(stories, tmp_path / "float", config, stored)
    assert np.array_equal(restored_tensors(path)[NAME], (codes.float() * scales).numpy())


def stored_with_changes(**changes: np.ndarray | None) -> dict[str, Any]:
    stored = random_packed_matrix(4, 4, "packed", True)[0] | {
        f"_{key}": value for key, value in changes.items()
    }
    return {ending: array for ending, array in stored.items() if array is not None}


FOUR_BITS = settings("pack-quantized", num_bits=4, group_size=43)


@pytest.mark.parametrize(
    ("config", "stored", "message"),
    [
        (
            settings("mxfp6-pack-quantized"),
            stored_with_changes(),
            "format mxfp6-pack-quantized is not supported",
        ),
        (settings("marlin-24"), stored_with_changes(), "format marlin-24"),
        (FOUR_BITS | {"format": ["x"]}, stored_with_changes(), r"format \['x'\]"),
        (
            FOUR_BITS | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            stored_with_changes(),
            "sparse format sparse-24-bitmask",
        ),
        (
            FOUR_BITS | {"transform_config": {"a": 1}},
            stored_with_changes(),
            "its weights are rotated",
        ),
        (
            settings("pack-quantized", num_bits=8),
            stored_with_changes(),
            "which is not 64 x 172 codes of 8 bits",
        ),
        (
            settings("pack-quantized", num_bits=[4]),
            stored_with_changes(),
            "codes of no number of bits",
        ),
        (
            FOUR_BITS,
            stored_with_changes(shape=np.array([64, 171], np.int64)),
            "does not name a group for each of 171 columns",
        ),
        (
            FOUR_BITS,
            stored_with_changes(shape=np.array([63, 172], np.int64)),
            "which is not 63 x 172 codes",
        ),
        (FOUR_BITS, stored_with_changes(shape=None), "has no .*_shape"),
        (
            FOUR_BITS,
            stored_with_changes(scale=np.ones((64, 3), np.float16)),
            "does not name a group",
        ),
        (
            FOUR_BITS,
            stored_with_changes(scale=np.ones((64, 3), np.float16), g_idx=None),
            "3 groups for 172 columns",
        ),
        (
            FOUR_BITS,
            stored_with_changes(scale=np.ones((4, 64), np.float16)),
            "does not fit 64 rows",
        ),
        (
            FOUR_BITS,
            stored_with_changes(zero_point=np.ones((8, 3), np.int32)),
            "which does not fit .*_scale",
        ),
        (
            FOUR_BITS,
            stored_with_changes(global_scale=np.ones(1, np.float32)),
            "weight_global_scale is unknown",
        ),
        (
            settings("int-quantized"),
            {"": np.ones(SHAPE, np.int8)},
            "down_proj.weight is stored as I8",
        ),
        (
            settings("int-quantized"),
            {"": np.ones(SHAPE, np.int8), "_scale": np.ones((64, 4), "f4")},
            "does not fit",
        ),
    ],
)
def test_unsupported_or_inconsistent_checkpoint_is_refused(
    config: dict[str, Any], stored: dict[str, Any], message: str, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(
            write_checkpoint(stories, tmp_path / "odd", config, stored)
        )
    assert re.search(message, str(caught.value)), caught.value


def test_matrix_with_the_settings_of_the_matching_group_is_restored(
    stories: Path, tmp_path: Path
) -> None:
    stored, values = random_packed_matrix(4, 4)
    config = settings("mixed-precision", num_bits=4, group_size=43)
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    config["config_groups"]["group_1"] = {
        "weights": {"num_bits": 8, "group_size": 43},
        "format": "int-quantized",
    }
    path = write_checkpoint(stories, tmp_path / "mixed", config, stored)
    restored = restored_tensors(path)
    assert np.array_equal(restored[NAME], values)
    assert checkpoint_source.open_checkpoint(path).weights


def test_only_the_shape_of_one_matrix_of_each_kind_is_read_at_open() -> None:
    arrays: dict[str, Any] = {}
    for layer in range(10):
        stored = random_packed_matrix(4, 4, "packed", True)[0]
        arrays |= {f"layers.{layer}.weight{ending}": array for ending, array in stored.items()}
    arrays["layers.7.weight_shape"] = np.array([64, 170], np.int64)
    stored_arrays = Stored(arrays)
    result = restore(FOUR_BITS, stored_arrays)
    assert sorted(stored_arrays.reads) == ["layers.0.weight_g_idx", "layers.0.weight_shape"]
    values = random_packed_matrix(4, 4, "packed", True)[1]
    assert np.array_equal(floats(result["layers.9.weight"]), values)
    with pytest.raises(UserError, match=r"layers\.7\.weight_shape differs from the shapes"):
        floats(result["layers.7.weight"])
