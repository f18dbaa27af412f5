"""The bytes of a context by layer: hybrids, and layers that predict further tokens."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from llmcli.planning.prediction import cache_layout
from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from quant.convert import checkpoint_source
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header
from quant.quantize import plan, write
from tests.quant import families, tiny_gguf


def header_of(folder: Path, arch: str, **settings: int) -> ModelHeader:
    """Return the header of a file with these settings, in which "__" stands for a dot."""
    writer = gguf.GGUFWriter(folder / "m.gguf", arch)
    for key, value in settings.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(folder / "m.gguf")


ATTENTION = {
    "embedding_length": 256,
    "attention__head_count": 4,
    "attention__head_count_kv": 2,
    "context_length": 1024,
}
STATES = {
    "ssm__inner_size": 512,
    "ssm__state_size": 16,
    "ssm__conv_kernel": 4,
    "ssm__group_count": 2,
}


def test_layers_that_predict_further_tokens_store_nothing(tmp_path: Path) -> None:
    header = header_of(tmp_path, "glm4moe", block_count=5, nextn_predict_layers=1, **ATTENTION)
    layers = cache_bytes_by_layer(header, ContextOptions(512))
    assert layers == (512 * 2 * 2 * 64 * 2,) * 4 + (0,)


def test_a_hybrid_with_such_layers_has_states_and_attention_in_the_others(tmp_path: Path) -> None:
    settings = {**ATTENTION, **STATES, "full_attention_interval": 4}
    header = header_of(tmp_path, "qwen35", block_count=9, nextn_predict_layers=1, **settings)
    layers = cache_bytes_by_layer(header, ContextOptions(512, n_seq_max=2))
    assert layers is not None
    attention, state = 512 * 2 * 2 * 64 * 2, 4 * 2 * (16 * 512 + 3 * (512 + 2 * 2 * 16))
    assert layers == (state, state, state, attention) * 2 + (0,)


@pytest.mark.parametrize(
    ("arch", "n_ubatch", "n_states"), [("qwen35", 512, 4), ("qwen35", 4, 1), ("qwen3next", 512, 1)]
)
def test_only_states_that_can_go_back_have_several_copies(
    tmp_path: Path, arch: str, n_ubatch: int, n_states: int
) -> None:
    header = header_of(tmp_path, arch, block_count=4, **ATTENTION, **STATES)
    options = ContextOptions(512, n_ubatch=n_ubatch)
    plain = cache_bytes_by_layer(header, options)
    several = cache_bytes_by_layer(header, replace(options, n_rs_seq=3))
    assert plain is not None
    assert several == (*(n_states * state for state in plain[:3]), plain[3])


def test_metadata_that_is_not_valid_predicts_nothing(tmp_path: Path) -> None:
    settings = {**ATTENTION, **STATES}
    header = header_of(tmp_path, "jamba", block_count=2, nextn_predict_layers=7, **settings)
    assert cache_bytes_by_layer(header, ContextOptions(512)) is None


HYBRIDS = (
    "lfm2",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen35, three value heads per key head",
    "qwen35, other order of layers, yarn",
    "gpt-oss",
)


def write_model(kind: str, folder: Path) -> Path:
    """Write a tiny random model: one of tiny_gguf, or the case of that name of tests/quant/families."""
    path = folder / "m.gguf"
    if kind == "gemma3":
        return tiny_gguf.gemma3(path, hidden=128, layers=6)
    if kind in ("llama", "mamba"):
        return {"llama": tiny_gguf.llama, "mamba": tiny_gguf.mamba}[kind](path)
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    case = next(case for case in families.cases() if case.name == kind)
    families.build(case, folder / "tiny")
    source = checkpoint_source.open_checkpoint(folder / "tiny")
    write.write_model(plan.plan_quantization(source, "F16"), path, threads=1)
    return path


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", *HYBRIDS])
def test_checkpoint_bytes_are_those_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    path = write_model(kind, tmp_path)
    header, options = read_header(path), ContextOptions(1024, 512, 512, 2)
    tokens = [number % 200 for number in range(512)]
    # Nemotron's heads have 48 values, and a block has 32
    type_k = "f32" if kind.startswith("nemotron") else "q8_0"
    with open_model(path) as model:
        for changed in (
            options,
            replace(options, flash_attn="off"),
            replace(options, flash_attn="on", type_k=type_k, type_v="f16"),
            replace(options, n_rs_seq=3),
            replace(options, unified=False),
        ):
            predicted = cache_layout.checkpoint_bytes(header, changed)
            with open_context(model, changed) as context:
                assert (predicted != 0) == context.needs_checkpoints
                if predicted != 0:
                    context.decode(BatchRows(tokens, range(512), [1] * 512, [False] * 512))
                    assert predicted == len(context.read_checkpoint(1))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", *HYBRIDS])
def test_the_bytes_of_the_layers_are_those_that_llama_cpp_allocates(
    tmp_path: Path, kind: str
) -> None:
    path = write_model(kind, tmp_path)
    header, options = read_header(path), ContextOptions(1024, 512, 512, 2)
    with open_model(path) as model:
        for n_rs_seq in (0, 3):
            changed = replace(options, n_rs_seq=n_rs_seq)
            predicted = cache_bytes_by_layer(header, changed)
            with open_context(model, changed) as context:
                breakdown = context.memory_breakdown()
            assert breakdown is not None and predicted is not None
            assert sum(predicted) == sum(buffer.context_bytes for buffer in breakdown.buffers)


def test_a_model_without_cache_takes_no_checkpoints(tmp_path: Path) -> None:
    header = header_of(tmp_path, "bert", block_count=2, **ATTENTION)
    assert cache_layout.checkpoint_bytes(header, ContextOptions(512)) == 0
