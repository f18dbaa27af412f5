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
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header
from tests.quant import tiny_gguf


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


@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba"])
def test_checkpoint_bytes_are_those_of_llama_cpp(
    tmp_path: Path, kind: str, is_unified: bool
) -> None:
    path = tmp_path / "m.gguf"
    if kind == "gemma3":
        tiny_gguf.gemma3(path, hidden=128, layers=6)
    else:
        {"llama": tiny_gguf.llama, "mamba": tiny_gguf.mamba}[kind](path)
    options = ContextOptions(1024, 512, 512, unified=is_unified)
    predicted = cache_layout.checkpoint_bytes(read_header(path), options)
    with open_model(path) as model, open_context(model, options) as context:
        if not context.needs_checkpoints:
            assert predicted == 0
            return
        tokens = [number % 200 for number in range(512)]
        context.decode(BatchRows(tokens, range(512), [0] * 512, [False] * 512))
        actual = len(context.read_checkpoint(0))
    assert predicted == pytest.approx(actual, rel=0.15)


def test_a_model_without_cache_takes_no_checkpoints(tmp_path: Path) -> None:
    header = header_of(tmp_path, "bert", block_count=2, **ATTENTION)
    assert cache_layout.checkpoint_bytes(header, ContextOptions(512)) == 0
