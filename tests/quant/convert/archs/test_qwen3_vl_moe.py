"""Fused experts of Qwen3-VL are converted as released checkpoints store them: transposed."""

from pathlib import Path

import numpy as np
import pytest

from quant.convert import checkpoint_source
from tests.quant import families, tiny_checkpoint


def test_transposed_experts_give_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    case = next(
        case for case in families.cases() if case.hf == "Qwen3VLMoeForConditionalGeneration"
    )
    folder = families.build(case, tmp_path / "model")
    released = tiny_checkpoint.copy(folder, tmp_path / "released")
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    turned = {
        name: np.swapaxes(values, 1, 2) if ".experts." in name else values
        for name, values in tensors.items()
    }
    assert sum(turned[name].shape != tensors[name].shape for name in tensors) == 4
    tiny_checkpoint.save(released / "model.safetensors", turned)
    plain, transposed = map(checkpoint_source.open_checkpoint, (folder, released))
    for weight, other in zip(plain.weights, transposed.weights, strict=True):
        assert (weight.name, weight.shape, weight.type) == (other.name, other.shape, other.type)
        assert (weight.read(0, weight.rows) == other.read(0, other.rows)).all(), weight.name
        middle = weight.rows // 2
        assert (weight.read(middle, middle + 1) == other.read(middle, middle + 1)).all()
