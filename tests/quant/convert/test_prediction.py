"""Layers that predict further tokens (MTP) are converted or left out, and the model's logits stay
the same.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.convert import checkpoint_source
from quant.convert.archs import ARCHS
from quant.convert.parts import block_tensors, prediction
from quant.errors import UserError
from quant.model_file import load_checks, read_header
from quant.native import ggml
from quant.quantize import plan, write
from quant.recipes import tensor_types
from quant.source.source import Source, Weight
from tests.quant import families, predicting_checkpoint, tiny_checkpoint


@pytest.fixture(scope="module", params=predicting_checkpoint.CLASSES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first tiny checkpoint of a class, with a prediction layer."""
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    return predicting_checkpoint.build(request.param, tmp_path_factory.mktemp("mtp") / "model")


def floats(weight: Weight) -> np.ndarray:
    """Return a weight's values as stored, rows first."""
    decoded = ggml.decode(
        weight.read(0, weight.rows), weight.type, weight.columns, label=weight.name
    )
    return decoded.reshape(tuple(reversed(weight.shape)))


def write_floats(source: Source, out: Path) -> Path:
    """Write a source as F32 and return `out`."""
    write.write_model(plan.plan_quantization(source, "F32"), out)
    return out


def split_names(source: Source) -> tuple[set[str], set[str]]:
    """Return the names of normal weights and of those of prediction layers."""
    names = {weight.name for weight in source.weights}
    predicting = {name for name in names if tensor_types.is_in_prediction_layer(name, source.facts)}
    return names - predicting, predicting


def copied_layers(source: Source) -> tuple[int, ...]:
    """Return the normal layers of which the prediction layer is a copy."""
    if source.facts.architecture == "nemotron_h_moe":
        return predicting_checkpoint.NEMOTRON_LAYERS
    return (source.facts.layers - 2,)


def test_prediction_layer_changes_no_logits(checkpoint: Path, tmp_path: Path) -> None:
    whole = checkpoint_source.open_checkpoint(checkpoint)
    short = checkpoint_source.open_checkpoint(checkpoint, with_prediction=False)
    files = [
        write_floats(whole, tmp_path / "whole.gguf"),
        write_floats(short, tmp_path / "short.gguf"),
    ]
    headers = [read_header.read_header(file) for file in files]
    for header in headers:
        load_checks.check_loadable(header)
    arch = headers[0].architecture
    layers = [header.metadata[f"{arch}.block_count"] for header in headers]
    assert [header.metadata.get(f"{arch}.nextn_predict_layers") for header in headers] == [1, None]
    assert layers[0] == layers[1] + 1
    logits, expected = (families.ours(file) for file in files)
    np.testing.assert_array_equal(logits, expected)
    assert families.nmse(logits, families.theirs(checkpoint)) < 1e-6


def test_prediction_layer_has_a_block_and_its_own_tensors(checkpoint: Path) -> None:
    source = checkpoint_source.open_checkpoint(checkpoint)
    normal, predicting = split_names(source)
    last = source.facts.layers - 1
    block = {
        name.replace(f"blk.{layer}.", "")
        for layer in copied_layers(source)
        for name in normal
        if name.startswith(f"blk.{layer}.")
    }
    if source.facts.architecture == "nemotron_h_moe":  # two layers are one block
        block.add("post_attention_norm.weight")
    assert {name.removeprefix(f"blk.{last}.") for name in predicting} == block | {
        f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    }
    assert any("converted as block" in note and "--no-mtp" in note for note in source.notes)
    short = checkpoint_source.open_checkpoint(checkpoint, with_prediction=False)
    assert {weight.name for weight in short.weights} == normal
    assert any(note.startswith("left out: 1 layer that predicts") for note in short.notes)
    assert short.facts.prediction_layers == 0


def test_values_of_a_prediction_layer_are_stored_as_those_of_others(checkpoint: Path) -> None:
    """Qwen stores the weights of norms minus one, here too."""
    stored = tiny_checkpoint.read(checkpoint / "model.safetensors")
    source = checkpoint_source.open_checkpoint(checkpoint)
    last = source.facts.layers - 1
    weights = {weight.name: weight for weight in source.weights}
    is_qwen = source.facts.architecture.startswith("qwen")
    pairs = (
        {
            "mtp.fc": "eh_proj",
            "mtp.norm": "shared_head_norm",
            "mtp.pre_fc_norm_hidden": "hnorm",
            "mtp.pre_fc_norm_embedding": "enorm",
        }
        if is_qwen
        else {f"mtp.layers.0.{name}": name for name in ("eh_proj", "enorm", "hnorm")}
        | {"mtp.layers.1.final_layernorm": "shared_head_norm"}
        if source.facts.architecture == "nemotron_h_moe"
        else {f"model.layers.{last}.{name}": name for name in ("eh_proj", "enorm", "hnorm")}
    )
    for theirs, ours in pairs.items():
        shift = 1 if is_qwen and "norm" in ours else 0
        np.testing.assert_array_equal(
            floats(weights[f"blk.{last}.nextn.{ours}.weight"]), stored[f"{theirs}.weight"] + shift
        )
    for role in ("attn_norm", "attn_output"):
        np.testing.assert_array_equal(
            floats(weights[f"blk.{last}.{role}.weight"]),
            floats(weights[f"blk.{copied_layers(source)[0]}.{role}.weight"]),
        )


def test_prediction_layers_get_q8_0_without_statistics(checkpoint: Path) -> None:
    whole = checkpoint_source.open_checkpoint(checkpoint)
    short = checkpoint_source.open_checkpoint(checkpoint, with_prediction=False)
    planned = plan.plan_quantization(whole, "Q4_K_M")
    types = {step.weight.name: step.type for step in planned.steps}
    predicting = split_names(whole)[1]
    assert {types[name] for name in predicting} <= {"Q8_0", "F32", "F16"}  # F16: odd rows
    assert types[f"blk.{whole.facts.layers - 1}.nextn.eh_proj.weight"] == "Q8_0"
    assert any("are Q8_0, because no statistics" in note for note in planned.notes)
    assert {
        step.weight.name: step.type for step in plan.plan_quantization(short, "Q4_K_M").steps
    } == {name: kind for name, kind in types.items() if name not in predicting}


def test_an_override_names_the_type_of_prediction_layers(checkpoint: Path) -> None:
    source = checkpoint_source.open_checkpoint(checkpoint)
    overrides = tensor_types.TypeOverrides(tensor_types=(r"nextn\.=Q6_K",))
    types = {
        step.weight.name: step.type
        for step in plan.plan_quantization(source, "Q4_K_M", overrides).steps
    }
    assert types[f"blk.{source.facts.layers - 1}.nextn.eh_proj.weight"] == "Q6_K"


def test_statistics_of_prediction_layers_make_the_rules_decide(checkpoint: Path) -> None:
    source = checkpoint_source.open_checkpoint(checkpoint)
    name = f"blk.{source.facts.layers - 1}.nextn.eh_proj.weight"
    tensors = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    kind = tensor_types.parse_file_type("Q4_K_M")
    measured = tensor_types.choose_types(tensors, kind, source.facts, with_importance={name})
    assert measured[name].type == "Q4_K"
    assert tensor_types.choose_types(tensors, kind, source.facts)[name].type == "Q8_0"


def test_float_types_have_no_remark(checkpoint: Path) -> None:
    planned = plan.plan_quantization(checkpoint_source.open_checkpoint(checkpoint), "BF16")
    assert not any("no statistics" in note for note in planned.notes)


def test_incomplete_prediction_layer_is_refused_unless_it_is_left_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tiny_checkpoint.copy(checkpoint, tmp_path / "model")
    tensors = tiny_checkpoint.read(checkpoint / "model.safetensors")
    norm = next(name for name in tensors if re.search(r"enorm|pre_fc_norm_embedding", name))
    tiny_checkpoint.save(
        folder / "model.safetensors", {name: tensors[name] for name in tensors if name != norm}
    )
    with pytest.raises(UserError, match=r"nextn\.enorm\.weight is missing"):
        checkpoint_source.open_checkpoint(folder)
    assert checkpoint_source.open_checkpoint(folder, with_prediction=False).weights


def test_layers_beyond_the_config_without_a_projection_stay_unknown() -> None:
    tensors = dict.fromkeys(["model.layers.2.mlp.weight", "model.layers.3.eh_proj.weight"])
    others, predicting = prediction.split_layers(tensors, 2)  # type: ignore[arg-type]
    assert (list(others), list(predicting)) == ([*tensors][:1], [*tensors][1:])
    assert prediction.count_layers(predicting, 2) == 2


def test_names_that_are_taken_are_kept() -> None:
    names = [
        "mtp.fc.weight",
        "model.mtp.fc.weight",
        "mtp.other.weight",
        "model.layers.2.enorm.weight",
        "mtp.pre_fc_norm_embedding.weight",
    ]
    config = CheckpointConfig({"num_hidden_layers": 2}, "config.json")
    moved = block_tensors.rename_tensors(
        dict.fromkeys(names),  # type: ignore[arg-type]
        lambda name: prediction.layer_name(config, name),
    )
    assert list(moved) == [
        "model.layers.2.eh_proj.weight",
        "model.mtp.fc.weight",
        "mtp.other.weight",
        "model.layers.2.enorm.weight",
        "mtp.pre_fc_norm_embedding.weight",
    ]


def test_several_prediction_layers_of_nemotron_are_left_out_and_told(
    tmp_path: Path,
) -> None:
    """llama.cpp computes one."""
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    folder = predicting_checkpoint.build(predicting_checkpoint.NEMOTRON, tmp_path / "model")
    tiny_checkpoint.edit(folder / "config.json", num_nextn_predict_layers=2)
    source = checkpoint_source.open_checkpoint(folder)
    assert source.facts.prediction_layers == 0
    assert any("are not converted: llama.cpp supports one" in note for note in source.notes)


def test_nemotron_without_experts_says_that_its_prediction_layer_is_left_out(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    case = next(case for case in families.cases() if case.hf == predicting_checkpoint.NEMOTRON)
    folder = families.build(case, tmp_path / "model")
    tiny_checkpoint.edit(folder / "config.json", num_nextn_predict_layers=1)
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    extra = {"mtp.layers.0.eh_proj.weight": np.ones((256, 512), np.float32)}
    tiny_checkpoint.save(folder / "model.safetensors", tensors | extra)
    source = checkpoint_source.open_checkpoint(folder)
    assert source.facts.prediction_layers == 0
    assert any("llama.cpp supports them with experts only" in note for note in source.notes)


def test_unknown_tensors_beside_nemotron_s_prediction_layer_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    folder = predicting_checkpoint.build(predicting_checkpoint.NEMOTRON, tmp_path / "model")
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    extra = {"mtp.layers.2.norm.weight": np.ones(256, np.float32)}
    tiny_checkpoint.save(folder / "model.safetensors", tensors | extra)
    with pytest.raises(UserError, match=r"mtp\.layers\.2\.norm\.weight"):
        checkpoint_source.open_checkpoint(folder)


def test_every_class_with_prediction_layers_is_tested() -> None:
    tested = {ARCHS[hf].name for hf in predicting_checkpoint.CLASSES}
    assert {arch.name for arch in ARCHS.values() if arch.prediction_shapes} <= tested
