"""The names of architectures and tensors agree with the gguf package, and libllama knows the
architectures that the package lacks.
"""

from pathlib import Path

import gguf
import pytest

from llmcli.runtime.binding.model import open_model
from quant.convert import gguf_tables
from quant.errors import UserError
from quant.gguf.layout import encode_entry, lay_out_file

CHANGED = {*gguf_tables.ADDED_TENSORS, *gguf_tables.NEW_ARCHITECTURES}


@pytest.mark.parametrize("kind", [arch.name for arch in gguf.MODEL_ARCH])
def test_names_of_the_gguf_package_are_unchanged(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorNameMap of some architectures changes this dictionary of the class
    table = gguf.TensorNameMap.block_mappings_cfg
    monkeypatch.setattr(gguf.TensorNameMap, "block_mappings_cfg", dict(table))
    arch = gguf.MODEL_ARCH[kind]
    theirs = gguf.TensorNameMap(arch, 3)
    find_name = gguf_tables.find_names(kind, 3)
    assert gguf_tables.architecture_name(kind) == gguf.MODEL_ARCH_NAMES[arch]
    assert {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]} <= (
        gguf_tables.tensor_names(kind)
    )
    for name in theirs.mapping:
        for ending in (".weight", ".bias", ""):
            assert find_name(name + ending) == theirs.get_name(name + ending, (".weight", ".bias"))


def test_names_beyond_the_last_block_are_unknown() -> None:
    find_name = gguf_tables.find_names("LLAMA", 2)
    assert find_name("model.layers.1.self_attn.q_proj.weight") == "blk.1.attn_q.weight"
    assert find_name("model.layers.2.self_attn.q_proj.weight") is None
    assert find_name("model.layers.1.self_attn.q_proj.scale") is None


def test_added_tensors_are_found() -> None:
    find_name = gguf_tables.find_names("QWEN35", 2)
    assert find_name("model.layers.1.eh_proj.weight") == "blk.1.nextn.eh_proj.weight"
    assert "blk.{bid}.nextn.shared_head_norm" in gguf_tables.tensor_names("QWEN35")


@pytest.mark.parametrize("kind", sorted(CHANGED))
def test_an_architecture_has_the_tensors_of_the_package_and_the_added_ones(kind: str) -> None:
    new = gguf_tables.NEW_ARCHITECTURES.get(kind)
    arch = gguf.MODEL_ARCH[new.like if new else kind]
    added = gguf_tables.ADDED_TENSORS.get(kind, ())
    assert gguf_tables.tensor_names(kind) == {
        gguf_tables.NEW_TENSORS[tensor].name
        if tensor in gguf_tables.NEW_TENSORS
        else gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[tensor]]
        for tensor in (*added, *(tensor.name for tensor in gguf.MODEL_TENSORS[arch]))
    }


def test_unknown_architecture_has_no_names() -> None:
    with pytest.raises(KeyError):
        gguf_tables.architecture_name("MARTIAN")


def load_error(name: str, folder: Path) -> str:
    """Return the error of libllama for a file that has nothing but the architecture's name."""
    path = folder / "model.gguf"
    path.write_bytes(
        lay_out_file([("general.architecture", encode_entry("string", name))], [], 32).header
    )
    with pytest.raises(UserError) as caught, open_model(path, vocab_only=True):
        pass
    return str(caught.value)


@pytest.mark.parametrize("kind", sorted(CHANGED))
def test_libllama_knows_the_architectures(kind: str, tmp_path: Path) -> None:
    error = load_error(gguf_tables.architecture_name(kind), tmp_path)
    assert "unknown model architecture" not in error
    assert "key not found in model" in error


def test_libllama_does_not_know_any_name(tmp_path: Path) -> None:
    assert "unknown model architecture" in load_error("martian", tmp_path)
