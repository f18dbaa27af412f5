"""Tiny checkpoints with a layer that predicts a further token (MTP)."""

from pathlib import Path

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.quant import families, tiny_checkpoint

RANDOM = np.random.default_rng(11)
NEMOTRON = "NemotronHForCausalLM"
CLASSES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm4MoeForCausalLM",
    NEMOTRON,
)
NEMOTRON_LAYERS = (2, 3)  # of attention and of experts in its tiny checkpoint


def build(hf: str, folder: Path) -> Path:
    """Write the first tiny checkpoint of a class of transformers, with a prediction layer, and
    return `folder`. Of Nemotron H it is the first one with experts.
    """
    case = next(
        case
        for case in families.cases()
        if case.hf == hf and (hf != NEMOTRON or case.name == "nemotron_h_moe")
    )
    families.build(case, folder)
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    if hf == NEMOTRON:
        layer = nemotron_layer(tensors)
        tiny_checkpoint.edit(folder / "config.json", num_nextn_predict_layers=1)
    else:
        layer = predicting_layer(hf, tensors, families.settings(case)["num_hidden_layers"])
    tiny_checkpoint.save(folder / "model.safetensors", tensors | layer)
    return folder


def write_gguf(path: Path, kind: str = "F32", hf: str = "Qwen3_5ForCausalLM") -> Path:
    """Write a tiny model with a prediction layer, a hybrid unless `hf` names another class, as a
    GGUF file of this type, and return `path`.
    Skips the test without the packages that make the checkpoint.
    """
    pytest.importorskip("torch", reason="torch is not installed: no checkpoint")
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    folder = build(hf, path.with_suffix(".checkpoint"))
    source = checkpoint_source.open_checkpoint(folder)
    write.write_model(plan.plan_quantization(source, kind), path, threads=1)
    return path


def noise(*shape: int) -> np.ndarray:
    return RANDOM.normal(0, 0.1, shape).astype(np.float32)


def nemotron_layer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of the two layers that predict a further token. They are copies of the
    model's layers of attention and of experts.
    """
    hidden = tensors["lm_head.weight"].shape[1]
    copies = {
        name.replace(f"backbone.layers.{layer}.", f"mtp.layers.{number}."): values
        for number, layer in enumerate(NEMOTRON_LAYERS)
        for name, values in tensors.items()
        if name.startswith(f"backbone.layers.{layer}.")
    }
    return copies | {
        "mtp.layers.0.eh_proj.weight": noise(hidden, 2 * hidden),
        "mtp.layers.0.enorm.weight": noise(hidden),
        "mtp.layers.0.hnorm.weight": noise(hidden),
        "mtp.layers.1.final_layernorm.weight": noise(hidden),
    }


def predicting_layer(hf: str, tensors: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Return the tensors of a prediction layer for a model of `count` layers. Its block is a copy
    of the last one, which has full attention.
    """
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    block = {
        name.split(f"layers.{count - 1}.")[1]: values
        for name, values in tensors.items()
        if name.startswith(f"model.layers.{count - 1}.")
    }
    if hf.startswith("Qwen"):
        return {f"mtp.layers.0.{name}": values for name, values in block.items()} | {
            "mtp.fc.weight": noise(hidden, 2 * hidden),
            "mtp.pre_fc_norm_embedding.weight": noise(hidden),
            "mtp.pre_fc_norm_hidden.weight": noise(hidden),
            "mtp.norm.weight": noise(hidden),
        }
    own = {
        "eh_proj.weight": noise(hidden, 2 * hidden),
        "enorm.weight": noise(hidden),
        "hnorm.weight": noise(hidden),
        "shared_head.norm.weight": noise(hidden),
        "shared_head.head.weight": tensors["lm_head.weight"],
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
    }
    return {f"model.layers.{count}.{name}": values for name, values in (block | own).items()}
