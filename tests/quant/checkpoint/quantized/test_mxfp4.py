"""MXFP4 experts keep all values: compared with a value table, gguf, transformers and logits."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import mxfp4
from quant.checkpoint.safetensors import LazyTensor
from quant.convert import checkpoint_source
from quant.errors import DamagedSourceError, UserError
from quant.model_file import load_checks, read_header
from quant.native import ggml
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from quant.recipes import tensor_types
from quant.source.source import Source, Weight
from tests.quant import families, tiny_checkpoint
from tests.quant.families.gptoss import HF, PLAIN

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
EXPERTS = re.compile(r"(.*\.mlp\.experts\.(?:gate_up|down)_proj)_(blocks|scales)")


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode MXFP4 codes [..., rows, blocks, 16] to floats [..., rows, blocks * 32].

    Each byte holds two codes, the lower half first. Values are scaled by 2 ** (scale - 127).
    """
    values = np.empty((*codes.shape[:-1], 32), np.float32)
    values[..., 0::2], values[..., 1::2] = TABLE[codes & 15], TABLE[codes >> 4]
    return np.ldexp(values, scales.astype(int)[..., None] - 127).reshape(*scales.shape[:-1], -1)


def random_blocks(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random codes and scales of a tensor of this shape, with values of about 0.1."""
    blocks = (*shape[:-1], shape[-1] // 32)
    codes = rng.integers(0, 256, (*blocks, 16), np.uint8)
    return codes, rng.integers(120, 125, blocks).astype(np.uint8)


def lazy_tensor(name: str, values: np.ndarray) -> LazyTensor:
    flat = values.reshape(-1, values.shape[-1])
    return LazyTensor(name, values.shape, "U8", Path("x"), lambda first, last: flat[first:last])


def decoded_weight(weight: Weight) -> np.ndarray:
    """Return the values of a weight, decoded by ggml, in the shape that torch uses."""
    floats = ggml.decode(
        weight.read(0, weight.rows), weight.type, weight.columns, label=weight.name
    )
    return floats.reshape(tuple(reversed(weight.shape)))


def test_ggml_and_gguf_decode_the_same_values() -> None:
    codes, scales = random_blocks(np.random.default_rng(0), 3, 4, 96)
    scales.reshape(-1)[:4] = 0, 1, 127, 252  # the smallest and largest powers of two
    tensor = mxfp4.make_mxfp4_tensor(
        "x", lazy_tensor("x_blocks", codes), lazy_tensor("x_scales", scales)
    )
    assert (tensor.shape, tensor.dtype) == ((3, 4, 96), "MXFP4")
    packed, expected = tensor.read(0, 12), decode(codes, scales).reshape(12, 96)
    assert (ggml.decode(packed, "MXFP4", 96, label="x") == expected).all()
    assert (gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.MXFP4) == expected).all()
    assert (tensor.read(5, 9) == packed[5:9]).all()


def test_reference_decoding_equals_transformers() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no oracle")
    theirs = pytest.importorskip(
        "transformers.integrations.mxfp4", reason="transformers is not installed"
    )
    codes, scales = random_blocks(np.random.default_rng(1), 2, 6, 64)
    decoded = theirs.convert_moe_packed_tensors(
        torch.tensor(codes), torch.tensor(scales), dtype=torch.float32
    )
    assert (decoded.numpy() == decode(codes, scales).swapaxes(1, 2)).all()


@pytest.mark.parametrize("scale", [253, 255])
def test_nan_or_overflowing_scale_is_refused_by_name(scale: int) -> None:
    codes, scales = random_blocks(np.random.default_rng(2), 1, 2, 64)
    scales[0, 1, 0] = scale
    tensor = mxfp4.make_mxfp4_tensor(
        "x", lazy_tensor("x_blocks", codes), lazy_tensor("layer.x_scales", scales)
    )
    assert tensor.read(0, 1).size
    with pytest.raises(DamagedSourceError, match=r"layer\.x_scales contains NaN or infinite"):
        tensor.read(0, 2)


@pytest.mark.parametrize("shape", [(1, 2, 2, 15), (1, 2, 3, 16), (2, 2, 16)])
def test_tensors_that_are_no_pair_of_blocks_and_scales_are_unchanged(
    shape: tuple[int, ...],
) -> None:
    tensors = {
        "x_blocks": lazy_tensor("x_blocks", np.zeros(shape, np.uint8)),
        "x_scales": lazy_tensor("x_scales", np.zeros((1, 2, 2), np.uint8)),
        "y_blocks": lazy_tensor("y_blocks", np.zeros((1, 2, 2, 16), np.uint8)),
    }
    assert mxfp4.restore(CheckpointConfig({}, "config.json"), tensors) == tensors


def test_pair_is_unchanged_if_its_float_tensor_exists() -> None:
    tensors = {
        "x": lazy_tensor("x", np.zeros((2, 64), np.uint8)),
        "x_blocks": lazy_tensor("x_blocks", np.zeros((2, 2, 16), np.uint8)),
        "x_scales": lazy_tensor("x_scales", np.zeros((2, 2), np.uint8)),
    }
    assert mxfp4.restore(CheckpointConfig({}, "config.json"), tensors) == tensors


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a gpt-oss checkpoint in floats and of one with the same experts in MXFP4."""
    pytest.importorskip(
        "transformers", reason="transformers is not installed: no checkpoint to change"
    )
    store = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    parent, rng = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(7)
    floats = families.build(families.Case("mxfp4", HF, PLAIN), parent / "floats")
    stored = store.load_file(floats / "model.safetensors")
    plain: dict[str, Any] = dict(stored)
    packed: dict[str, Any] = dict(stored)
    for name, value in stored.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = value.shape
            codes, scales = random_blocks(rng, experts, outer, inner)
            plain[name] = np.ascontiguousarray(decode(codes, scales).swapaxes(1, 2))
            del packed[name]
            packed |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    store.save_file(plain, floats / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    quantized = tiny_checkpoint.copy(floats, parent / "quantized", quantization_config=method)
    store.save_file(packed, quantized / "model.safetensors", {"format": "pt"})
    return floats, quantized


def expert_weights(source: Source) -> dict[str, Weight]:
    return {weight.name: weight for weight in source.weights if "_exps.weight" in weight.name}


def test_mxfp4_experts_have_the_values_of_the_floats_and_other_tensors_the_same_bytes(
    checkpoints: tuple[Path, Path],
) -> None:
    floats, packed = map(checkpoint_source.open_checkpoint, checkpoints)
    assert {weight.type for weight in expert_weights(packed).values()} == {"MXFP4"}
    assert [weight.name for weight in floats.weights] == [weight.name for weight in packed.weights]
    for float_weight, packed_weight in zip(floats.weights, packed.weights, strict=True):
        assert (float_weight.shape, decoded_weight(float_weight).tobytes()) == (
            packed_weight.shape,
            (decoded_weight(packed_weight) + 0.0).tobytes(),
        ) or (
            float_weight.shape == packed_weight.shape
            and (decoded_weight(float_weight) == decoded_weight(packed_weight)).all()
            and float_weight.name in expert_weights(packed)
        )
    packed_entries, float_entries = dict(packed.entries), dict(floats.entries)
    assert packed_entries.pop("llmcli.convert.source_method").endswith(b"mxfp4")
    general_keys = dict.fromkeys(
        (key for key in packed_entries | float_entries if key.startswith("general.")), b""
    )
    assert packed_entries | general_keys == float_entries | general_keys


def test_rows_read_in_spans_equal_one_read(checkpoints: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(5)
    for weight in [
        weight
        for folder in checkpoints
        for weight in checkpoint_source.open_checkpoint(folder).weights
    ]:
        cuts = sorted({0, weight.rows, *rng.integers(0, weight.rows, 3).tolist()})
        row_spans = [weight.read(first, last) for first, last in pairwise(cuts)]
        assert (np.concatenate(row_spans) == weight.read(0, weight.rows)).all(), weight.name


def test_logits_equal_transformers_for_floats_and_nearly_for_mxfp4(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    logits = []
    for folder in checkpoints:
        out = tmp_path / f"{folder.name}.gguf"
        write.write_model(plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out)
        load_checks.check_loadable(read_header.read_header(out))
        logits.append(families.ours(out))
    theirs = families.theirs(checkpoints[0])
    assert families.nmse(logits[0], theirs) < 1e-6
    equal_tokens, clear_tokens = families.agreement(logits[0], theirs)
    assert equal_tokens == clear_tokens > 300
    # llama.cpp rounds the activations to eight bits before it multiplies them with MXFP4.
    assert families.nmse(logits[1], theirs) < 0.02


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K_M", "Q2_K"])
@pytest.mark.parametrize("pure", [False, True])
def test_experts_stay_mxfp4_for_every_file_type(
    checkpoints: tuple[Path, Path], kind: str, pure: bool
) -> None:
    plan = plan_quantization(
        checkpoint_source.open_checkpoint(checkpoints[1]),
        kind,
        tensor_types.TypeOverrides(pure=pure),
    )
    mxfp4_steps = [step for step in plan.steps if step.weight.type == "MXFP4"]
    assert len(mxfp4_steps) == 9 and {step.type for step in mxfp4_steps} == {"MXFP4"}
    assert not plan.requantized_types
    assert [
        note for note in plan.notes if "9 tensors stay MXFP4" in note and "--tensor-type" in note
    ]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_are_requantized_if_the_user_overrides_their_type(
    checkpoints: tuple[Path, Path], kind: str, tmp_path: Path
) -> None:
    source = checkpoint_source.open_checkpoint(checkpoints[1])
    plan = plan_quantization(source, kind, tensor_types.TypeOverrides(("ffn_down_exps=q5_0",)))
    assert {step.type for step in plan.steps if "ffn_down_exps.weight" in step.weight.name} == {
        "Q5_0"
    }
    assert {step.type for step in plan.steps if "ffn_up_exps.weight" in step.weight.name} == {
        "MXFP4"
    }
    assert plan.requantized_types == ("MXFP4",)
    write.write_model(plan, tmp_path / "x.gguf")
    again = plan_quantization(write.open_gguf(tmp_path / "x.gguf"), "Q4_0")
    assert {step.type for step in again.steps if "ffn_up_exps.weight" in step.weight.name} == {
        "MXFP4"
    }


def test_missing_scales_and_a_family_without_mxfp4_are_refused(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    store = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    broken = tiny_checkpoint.copy(checkpoints[1], tmp_path / "lame")
    stored = store.load_file(broken / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    store.save_file(stored, broken / "model.safetensors")
    with pytest.raises(
        UserError, match=r"down_proj_blocks is unknown.*blk\.1\.ffn_down_exps\.weight is missing"
    ):
        checkpoint_source.open_checkpoint(broken)
    tiny_checkpoint.edit(
        broken / "config.json", architectures=["LlamaForCausalLM"], num_local_experts=None
    )
    with pytest.raises(UserError, match=r"mlp\.experts\.down_proj_bias is unknown"):
        checkpoint_source.open_checkpoint(broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ({"attention_bias": False}, "no biases"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope type is 'llama3'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 8}},
            "beta_fast, beta_slow or truncate",
        ),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_settings_that_llama_cpp_does_not_support_are_refused(
    checkpoints: tuple[Path, Path], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        checkpoint_source.open_checkpoint(
            tiny_checkpoint.copy(checkpoints[0], tmp_path / "model", **change)
        )


def test_untruncated_yarn_range_is_reported(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    }
    for truncate in (True, False):
        changed = tiny_checkpoint.copy(
            checkpoints[0], tmp_path / str(truncate), rope_parameters=yarn | {"truncate": truncate}
        )
        assert (
            any("yarn ramp" in note for note in checkpoint_source.open_checkpoint(changed).notes)
            is not truncate
        )
