"""Separate or fused experts become one tensor per projection, and mismatches are named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert import checkpoint_source
from quant.convert.parts import experts
from quant.errors import UserError
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import families, tiny_checkpoint
from tests.quant.checkpoint.test_tensor_views import half, lazy, values

CONFIG = CheckpointConfig(
    {"num_experts": 3, "num_experts_per_tok": 2, "hidden_size": 8}, "config.json"
)
PREFIX = "model.layers.1.mlp.experts"
RANDOM = np.random.default_rng(7)


def separate_experts(count: int = 3) -> Tensors:
    """Return the separate projections of `count` experts, with 6 hidden units and 8 inputs."""
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    names = [
        (f"{PREFIX}.{i}.{kind}.weight", shape)
        for i in range(count)
        for kind, shape in shapes.items()
    ]
    return {name: lazy(RANDOM.normal(size=shape).astype(np.float32), name) for name, shape in names}


def test_separate_experts_are_stacked_by_number() -> None:
    tensors = separate_experts()
    stacked = experts.stack_experts(CONFIG, dict(reversed(tensors.items())))
    assert set(stacked) == {f"{PREFIX}.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    for kind in ("gate", "up", "down"):
        stack = values(stacked[f"{PREFIX}.{kind}_proj.weight"])
        for i in range(3):
            np.testing.assert_array_equal(
                stack[i], values(tensors[f"{PREFIX}.{i}.{kind}_proj.weight"])
            )


@pytest.mark.parametrize("ending", ["", ".weight"])
def test_fused_experts_are_split_into_gate_and_up(ending: str) -> None:
    gate_up, down = (
        RANDOM.normal(size=(3, 12, 8)).astype(np.float32),
        RANDOM.normal(size=(3, 8, 6)).astype(np.float32),
    )
    tensors = {
        f"{PREFIX}.{kind}{ending}": lazy(data)
        for kind, data in (("gate_up_proj", gate_up), ("down_proj", down))
    }
    stacked = experts.stack_experts(CONFIG, tensors)
    gate, up = (np.empty((3, 6, 8), np.float32) for _ in range(2))
    for i in range(3):
        for row in range(6):
            gate[i, row], up[i, row] = gate_up[i, row], gate_up[i, 6 + row]
    np.testing.assert_array_equal(values(stacked[f"{PREFIX}.gate_proj.weight"]), gate)
    np.testing.assert_array_equal(values(stacked[f"{PREFIX}.up_proj.weight"]), up)
    np.testing.assert_array_equal(values(stacked[f"{PREFIX}.down_proj.weight"]), down)
    assert len(stacked) == 3


def test_experts_of_different_float_types_become_f32() -> None:
    tensors = separate_experts()
    name = f"{PREFIX}.1.up_proj.weight"
    tensors[name] = half(values(tensors[name]), name)
    stack = experts.stack_experts(CONFIG, tensors)[f"{PREFIX}.up_proj.weight"]
    assert stack.dtype == "F32"
    np.testing.assert_array_equal(values(stack)[1], tensor_views.read_floats(tensors[name]))


def test_stack_names_its_missing_expert() -> None:
    tensors = separate_experts()
    del tensors[f"{PREFIX}.1.down_proj.weight"]
    stack = experts.stack_experts(CONFIG, tensors)[f"{PREFIX}.down_proj.weight"]
    assert stack.shape == (2, 8, 6)
    assert stack.name.endswith("down_proj.weight without expert 1")


def test_unexpected_experts_are_unchanged() -> None:
    tensors = separate_experts(4)  # one too many
    odd = f"{PREFIX}.2.gate_proj.weight"
    tensors[odd] = lazy(np.zeros((5, 8), np.float32), odd)
    stacked = experts.stack_experts(CONFIG, tensors)
    assert {name for name in stacked if name in tensors} == {
        odd,
        *(f"{PREFIX}.3.{kind}_proj.weight" for kind in ("gate", "up", "down")),
    }
    assert stacked[f"{PREFIX}.gate_proj.weight"].shape == (2, 6, 8)


def test_experts_in_two_spellings_are_not_mixed() -> None:
    fused = f"{PREFIX}.gate_up_proj"
    tensors = separate_experts() | {fused: lazy(np.zeros((3, 12, 8), np.float32), fused)}
    stacked = experts.stack_experts(CONFIG, tensors)
    unchanged = {name for name in stacked if name in tensors}
    assert unchanged == {
        f"{PREFIX}.{i}.{kind}_proj.weight" for i in range(3) for kind in ("gate", "up")
    }


@pytest.mark.parametrize("shape", [(3, 11, 8), (12, 8)])
def test_fused_tensor_of_wrong_shape_is_unchanged(shape: tuple[int, ...]) -> None:
    fused = f"{PREFIX}.gate_up_proj"
    assert set(
        experts.stack_experts(CONFIG, {fused: lazy(np.zeros(shape, np.float32), fused)})
    ) == {fused}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"num_experts": 1025}, "1025 experts"), ({"num_experts_per_tok": 4}, "4 of 3 experts")],
)
def test_impossible_expert_counts_are_reported(changes: dict[str, int], problem: str) -> None:
    problems = [
        text
        for wrong, text in experts.expert_problems(
            CheckpointConfig({**CONFIG.values, **changes}, "config.json")
        )
        if wrong
    ]
    assert len(problems) == 1
    assert problem in problems[0]


@pytest.fixture
def mixtral(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The folder and the tensors of a Mixtral with one layer and four experts; all weights are 0.

    The folder has the config and the stories260K tokenizer. The tensors are not yet saved.
    """
    config: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "num_local_experts": 4,
    }
    families.copy_tokenizer(families.STORIES, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    block = "model.layers.0"
    shapes = {
        "model.embed_tokens": (512, 64),
        "lm_head": (512, 64),
        "model.norm": (64,),
        f"{block}.input_layernorm": (64,),
        f"{block}.post_attention_layernorm": (64,),
        f"{block}.block_sparse_moe.gate": (4, 64),
        **{f"{block}.self_attn.{kind}_proj": (64, 64) for kind in "qkvo"},
        **{
            f"{block}.block_sparse_moe.experts.{i}.{kind}": (64, 32) if kind == "w2" else (32, 64)
            for i in range(4)
            for kind in ("w1", "w2", "w3")
        },
    }
    return tmp_path, {
        f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()
    }


def test_one_error_names_all_missing_and_unknown_experts(
    mixtral: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, tensors = mixtral
    moe = "model.layers.0.block_sparse_moe.experts"
    del tensors[f"{moe}.2.w1.weight"]
    tensors[f"{moe}.4.w2.weight"] = np.zeros((64, 32), np.float32)
    tensors[f"{moe}.0.w3.weight"] = np.zeros((32, 32), np.float32)
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    with pytest.raises(UserError, match="4 tensors do not fit") as caught:
        checkpoint_source.open_checkpoint(folder)
    for message in (
        f"{moe}.w1.weight without expert 2 is [3, 32, 64], not [4, 32, 64]",
        f"{moe}.4.w2.weight is unknown",
        f"{moe}.0.w3.weight is unknown",
        f"{moe}.w3.weight without expert 0 is",
    ):
        assert message in str(caught.value)


def test_recipe_gets_the_expert_count(
    mixtral: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    folder, tensors = mixtral
    tensors = {
        name: RANDOM.normal(size=data.shape).astype(np.float32) for name, data in tensors.items()
    }
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    source = checkpoint_source.open_checkpoint(folder)
    assert source.facts.experts == 4
    write.write_model(plan.plan_quantization(source, "Q8_0"), tmp_path / "out.gguf", threads=1)
    types = {
        tensor.name: tensor.type
        for tensor in read_header.read_header(tmp_path / "out.gguf").tensors
    }
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0"
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
