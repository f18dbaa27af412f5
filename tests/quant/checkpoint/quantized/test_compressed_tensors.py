"""compressed-tensors checkpoints, packed from known numbers as the library stores them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.errors import UserError
from tests.quant import tiny_checkpoint
from tests.quant.quantized_checkpoint import opened, write

torch = pytest.importorskip(
    "torch", reason="torch is not installed: safetensors has no int32 writer here"
)
NAME = "model.layers.0.mlp.down_proj.weight"
SHAPE = (64, 172)


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, m] into int32 words [n, m / codes a word], the last of them partly empty."""
    count = 32 // bits
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] // count)), np.uint32)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            packed[i, j // count] |= np.uint32(int(codes[i, j]) << (bits * (j % count)))
    return packed.view(np.int32)


def packed(
    bits: int, groups: int, zeros: str = "", order: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A random packed matrix: its stored tensors, and the floats they stand for."""
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
        "_packed": words(codes + middle, bits),
        "_scale": scale,
        "_shape": np.array(SHAPE, np.int64),
        "_g_idx": g_idx.astype(np.int32) if order else None,
        "_zero_point": {
            "": None,
            "packed": words((zero + middle).T, bits).T,
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


def folder(stories: Path, target: Path, told: dict[str, Any], stored: dict[str, Any]) -> Path:
    """The stories with one matrix under other tensors: ending -> array or torch tensor."""
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
        told,
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
def test_packed_floats_come_back(
    bits: int, groups: int, zeros: str, order: bool, stories: Path, tmp_path: Path
) -> None:
    stored, values = packed(bits, groups, zeros, order)
    told = settings(
        "pack-quantized", num_bits=bits, group_size=-(-SHAPE[1] // groups) if groups > 1 else None
    )
    found = opened(folder(stories, tmp_path / "packed", told, stored))
    assert np.array_equal(found[NAME], values)
    assert not any(name.startswith(NAME) and name != NAME for name in found)


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, m] into int32 words [n, m bits / 32] without a gap: a code may lie in two words."""
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] * bits // 32)), np.int32)
    for i, row in enumerate(codes):
        whole = sum(int(code) << (bits * j) for j, code in enumerate(row))
        packed[i] = np.frombuffer(whole.to_bytes(packed.shape[1] * 4, "little"), np.int32)
    return packed


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_codes_that_follow_one_another_without_a_gap_come_back(
    bits: int, stories: Path, tmp_path: Path
) -> None:
    """As the library packs since pack_to_int32 leaves no bits empty; before, a code never lay in
    two words.
    """
    random, middle = np.random.default_rng(bits), 2 ** (bits - 1)
    codes, zeros = random.integers(0, 2**bits, SHAPE), random.integers(0, 2**bits, (64, 4))
    scale = random.uniform(0.01, 0.02, (64, 4)).astype(np.float16)
    stored = {"_packed": stream(codes, bits), "_scale": scale, "_shape": np.array(SHAPE, np.int64)}
    told = settings("pack-quantized", num_bits=bits, group_size=43)
    wide = np.repeat(scale.astype(np.float32), 43, axis=1)
    found = opened(folder(stories, tmp_path / "even", told, stored))
    assert np.array_equal(found[NAME], (codes - middle).astype(np.float32) * wide)
    stored["_zero_point"] = stream(zeros.T, bits).T
    found = opened(folder(stories, tmp_path / "zeros", told, stored))
    assert np.array_equal(
        found[NAME], (codes - np.repeat(zeros, 43, axis=1)).astype(np.float32) * wide
    )


def test_one_scale_for_a_whole_tensor_and_groups_in_their_own_order(
    stories: Path, tmp_path: Path
) -> None:
    stored, values = packed(4, 1)
    values = values / stored["_scale"].astype(np.float32) * np.float32(0.5)
    stored |= {"_scale": np.array([0.5], np.float32), "_g_idx": np.full(SHAPE[1], -1, np.int32)}
    found = opened(
        folder(stories, tmp_path / "packed", settings("pack-quantized", num_bits=4), stored)
    )
    assert np.allclose(found[NAME], values, rtol=1e-6)


@pytest.mark.parametrize("shape", [(64, 1), (1,), (64, 4)])
@pytest.mark.parametrize("zeros", [False, True])
def test_eight_bit_integers_come_back(
    shape: tuple[int, ...], zeros: bool, stories: Path, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, SHAPE).astype(np.int8)
    scale = random.uniform(0.01, 0.02, shape).astype(np.float32)
    zero = random.integers(-20, 20, shape).astype(np.int8)
    columns = np.arange(SHAPE[1]) // 43 if shape == (64, 4) else np.zeros(SHAPE[1], int)
    wide = np.broadcast_to(scale, (64, shape[-1]))[:, columns]
    taken = np.broadcast_to(zero, (64, shape[-1]))[:, columns].astype(np.float32) if zeros else 0
    stored: dict[str, Any] = {
        "": codes,
        "_scale": scale,
        **({"_zero_point": zero} if zeros else {}),
    }
    told = settings("int-quantized", group_size=43 if shape == (64, 4) else None)
    found = opened(folder(stories, tmp_path / "int", told, stored))
    assert np.array_equal(found[NAME], (codes.astype(np.float32) - taken) * wide)


@pytest.mark.parametrize(("shape", "block"), [((64, 1), None), ((1,), None), ((3, 6), [24, 32])])
def test_eight_bit_floats_come_back(
    shape: tuple[int, ...], block: list[int] | None, stories: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    codes = torch.randn(SHAPE).to(torch.float8_e4m3fn)
    scale = torch.rand(shape).bfloat16()
    wide = scale.float()
    if block:
        wide = wide.repeat_interleave(24, 0).repeat_interleave(32, 1)[:64, :172]
    stored = {"": codes, "_scale": scale}
    told = settings(
        "float-quantized",
        type="float",
        block_structure=block,
        strategy="block" if block else "channel",
    )
    path = folder(stories, tmp_path / "float", told, stored)
    assert np.array_equal(opened(path)[NAME], (codes.float() * wide).numpy())


def broken(**changes: np.ndarray | None) -> dict[str, Any]:
    stored = packed(4, 4, "packed", True)[0] | {f"_{key}": value for key, value in changes.items()}
    return {ending: array for ending, array in stored.items() if array is not None}


FOUR = settings("pack-quantized", num_bits=4, group_size=43)


@pytest.mark.parametrize(
    ("told", "stored", "said"),
    [
        (
            settings("nvfp4-pack-quantized"),
            broken(),
            "format nvfp4-pack-quantized is not supported",
        ),
        (settings("marlin-24"), broken(), "format marlin-24"),
        (FOUR | {"format": ["x"]}, broken(), r"format \['x'\]"),
        (
            FOUR | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            broken(),
            "sparse format sparse-24-bitmask",
        ),
        (FOUR | {"transform_config": {"a": 1}}, broken(), "its weights are rotated"),
        (settings("pack-quantized", num_bits=8), broken(), "which is not 64 x 172 codes of 8 bits"),
        (settings("pack-quantized", num_bits=[4]), broken(), "codes of no number of bits"),
        (
            FOUR,
            broken(shape=np.array([64, 171], np.int64)),
            "does not name a group for each of 171 columns",
        ),
        (FOUR, broken(shape=np.array([63, 172], np.int64)), "which is not 63 x 172 codes"),
        (FOUR, broken(shape=None), "has no .*_shape"),
        (FOUR, broken(scale=np.ones((64, 3), np.float16)), "does not name a group"),
        (FOUR, broken(scale=np.ones((64, 3), np.float16), g_idx=None), "3 groups for 172 columns"),
        (FOUR, broken(scale=np.ones((4, 64), np.float16)), "does not fit 64 rows"),
        (FOUR, broken(zero_point=np.ones((8, 3), np.int32)), "which does not fit .*_scale"),
        (FOUR, broken(global_scale=np.ones(1, np.float32)), "weight_global_scale is unknown"),
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
def test_what_does_not_fit_is_told(
    told: dict[str, Any], stored: dict[str, Any], said: str, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        checkpoint_source.open_checkpoint(folder(stories, tmp_path / "odd", told, stored))
    assert re.search(said, str(caught.value)), caught.value


def test_scales_of_activations_are_left_out_and_several_groups_agree(
    stories: Path, tmp_path: Path
) -> None:
    stored, values = packed(4, 4)
    told = settings("mixed-precision", num_bits=4, group_size=43)
    told["config_groups"]["group_0"]["format"] = "pack-quantized"
    told["config_groups"]["group_1"] = {
        "weights": {"num_bits": 8, "group_size": 43},
        "format": "int-quantized",
    }
    path = folder(stories, tmp_path / "mixed", told, stored)
    found = opened(path)
    assert np.array_equal(found[NAME], values)
    assert checkpoint_source.open_checkpoint(path).weights
