"""The predicted bytes of the KV cache equal those that llama.cpp allocates.

scripts/benchmarks/kv_size.py compares more models and contexts.
"""

import os
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from quant.convert import checkpoint_source
from quant.gguf.header import GgufArray
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import families, tiny_gguf

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
}


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("f16", 47_185_920), ("q8_0", 25_067_520), ("q4_0", 13_271_040)]
)
def test_cache_sizes_of_smollm2(kind, nbytes):
    shape = kv_size.read_shape(LLAMA)
    assert shape is not None
    cache = kv_size.predict_cache(shape, 2000, kind, kind, n_ubatch=512)
    assert (cache.nbytes, cache.cells) == (nbytes, 2048)
    assert cache.bytes_per_token * cache.cells == nbytes


def test_the_architecture_says_whether_there_is_recurrent_state(tmp_path: Path) -> None:
    """llama.cpp says the same of each architecture that it loads a vocabulary for."""
    found = set()
    for architecture in {*gguf.MODEL_ARCH_NAMES.values(), *kv_size.RECURRENT_STATE_ARCHS}:
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        tiny_gguf.vocabulary(writer, 300)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with suppress(UserError), open_model(path, vocab_only=True) as model:
            found |= {architecture} if model.is_recurrent else set()
    assert found == kv_size.RECURRENT_STATE_ARCHS


def check(path: Path, n_ctx: int, type_k: str, type_v: str, flash: str, slots: int) -> None:
    shape = kv_size.read_shape(read_header.read_header(path).metadata)
    assert shape is not None
    options = ContextOptions(n_ctx, 512, 128, slots, 1, 1, type_k, type_v, flash)
    with open_model(path) as model, open_context(model, options) as context:
        breakdown = context.memory_breakdown()
        cache = kv_size.predict_cache(
            shape,
            context.n_ctx,
            type_k,
            type_v,
            n_ubatch=context.n_ubatch,
            n_seq_max=slots,
            flash=flash != "off",
        )
        assert breakdown is not None
        assert cache.nbytes - breakdown.context_bytes == 0


CASES = [
    (512, "f16", "f16", "auto", 1),
    (2048, "q8_0", "q8_0", "auto", 1),
    (1000, "q8_0", "q4_0", "on", 1),
    (1024, "f32", "f16", "off", 1),
    (768, "bf16", "iq4_nl", "on", 1),
    (2048, "q5_1", "q5_0", "on", 3),
    (4096, "f16", "f16", "off", 2),
    (1500, "q4_1", "f16", "auto", 4),
]


@pytest.mark.model
@pytest.mark.parametrize(("n_ctx", "type_k", "type_v", "flash", "slots"), CASES)
def test_smollm2(smollm2, n_ctx, type_k, type_v, flash, slots):
    check(smollm2, n_ctx, type_k, type_v, flash, slots)


@pytest.mark.model
@pytest.mark.parametrize(("n_ctx", "type_k", "type_v", "flash", "slots"), CASES)
def test_gemma3_with_its_sliding_window(gemma3, n_ctx, type_k, type_v, flash, slots):
    check(gemma3, n_ctx, type_k, type_v, flash, slots)


def test_unknown_architectures_have_no_prediction():
    assert kv_size.read_shape({**LLAMA, "llama.attention.kv_lora_rank": 512}) is None
    assert (
        kv_size.read_shape(
            {"general.architecture": "mamba", "mamba.block_count": 4, "mamba.ssm.state_size": 16}
        )
        is None
    )
    strange = {key.replace("llama.", "strange."): value for key, value in LLAMA.items()}
    assert (
        kv_size.read_shape(
            {**strange, "general.architecture": "strange", "strange.attention.sliding_window": 128}
        )
        is None
    )
    assert kv_size.read_shape({}) is None


def test_a_window_that_llama_cpp_ignores_changes_nothing():
    """Mistral v0.1 is a Llama with a window in its header, which llama.cpp does not use."""
    assert kv_size.read_shape(
        {**LLAMA, "llama.attention.sliding_window": 128}
    ) == kv_size.read_shape(LLAMA)


def test_latent_attention_stores_only_compressed_keys():
    """DeepSeek V2 Lite has 27 layers of 512 + 64 values, and no V cache."""
    head = {
        "block_count": 27,
        "embedding_length": 2048,
        "attention.head_count": 16,
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
    }
    metadata = {
        "general.architecture": "deepseek2",
        **{f"deepseek2.{key}": value for key, value in head.items()},
    }
    shape = kv_size.read_shape(metadata)
    assert shape is not None
    cache = kv_size.predict_cache(shape, 4096, "f16", "f16", n_ubatch=512)
    assert cache.nbytes == 27 * 4096 * 576 * 2
    assert sum(layer.v_bytes for layer in cache.layers) == 0
    refusal = kv_size.find_refusal(shape, "q8_0", "f16")
    assert refusal
    assert "-ctk q8_0 -ctv q8_0" in refusal[1]


# Contexts of the tiny models: type of K, type of V, flash attention, one pool, tokens, sequences,
# micro-batch.
TINY = [
    ("f16", "f16", "auto", True, 300, 1, 512),
    ("q8_0", "q8_0", "auto", False, 2500, 3, 64),
    ("q4_0", "q4_0", "on", True, 2500, 8, 128),
    ("iq4_nl", "iq4_nl", "auto", False, 1024, 8, 16),
    ("f32", "f32", "off", True, 1024, 3, 64),
    ("bf16", "q5_1", "on", False, 700, 2, 32),
]


def check_tiny(path: Path) -> kv_size.CacheShape:
    shape = kv_size.read_shape(read_header.read_header(path).metadata)
    assert shape is not None
    with open_model(path) as model:
        for type_k, type_v, flash, unified, n_ctx, slots, n_ubatch in TINY:
            options = ContextOptions(
                n_ctx, 512, n_ubatch, slots, 1, 1, type_k, type_v, flash, unified
            )
            if kv_size.find_refusal(shape, type_k, type_v):
                with (
                    pytest.raises(UserError, match=r"llama\.cpp refuses"),
                    open_context(model, options),
                ):
                    pass
                continue
            cache = kv_size.predict_cache(
                shape,
                n_ctx,
                type_k,
                type_v,
                n_ubatch=n_ubatch,
                n_seq_max=slots,
                flash=flash != "off",
                unified=unified,
            )
            with open_context(model, options) as context:
                breakdown = context.memory_breakdown()
                assert breakdown is not None
                assert cache.nbytes - breakdown.context_bytes == 0, options
                assert cache.cells == context.n_ctx
    return shape


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_number_of_key_heads(tmp_path, kv_heads):
    assert not check_tiny(
        tiny_gguf.llama(tmp_path / "m.gguf", kv_heads=kv_heads, layers=3)
    ).is_latent


def test_a_sliding_window_in_some_layers(tmp_path):
    shape = check_tiny(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=7))
    assert shape.is_windowed == (True, True, True, True, True, False, True)


@pytest.mark.parametrize(
    "name", ["deepseek v2, compressed queries", "gpt-oss", "gemma2, other sliding layers"]
)
def test_compressed_keys_and_windows_of_other_families(tmp_path, name):
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    (case,) = (case for case in families.cases() if case.name == name)
    folder, out = families.build(case, tmp_path / "model"), tmp_path / "model.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out, threads=1
    )
    shape = check_tiny(out)
    assert shape.is_latent == name.startswith("deepseek")


def test_a_window_that_no_layer_has_is_refused_where_llama_cpp_would_abort(tmp_path, monkeypatch):
    def add_window_of_no_layer(writer: gguf.GGUFWriter, window: int) -> None:
        writer.add_uint32("gemma3.attention.sliding_window", window)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 1)

    monkeypatch.setattr(gguf.GGUFWriter, "add_sliding_window", add_window_of_no_layer)
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128)
    with (
        pytest.raises(UserError, match="no layer"),
        open_runner(path, RunOptions(ctx_size=256, threads=1)),
    ):
        pass


def test_cache_types_whose_blocks_heads_do_not_fill_are_refused(stories_gguf):
    """stories260K has heads of 8 values. llama.cpp refuses some of these types and computes wrong
    results for others.
    """
    q8_0_keys = RunOptions(
        ctx_size=256, threads=1, batch_size=32, cache_type_k="q8_0", cache_type_v="f16"
    )
    q4_0_values = replace(q8_0_keys, cache_type_k="f16", cache_type_v="q4_0")
    for options in (q8_0_keys, replace(q8_0_keys, flash_attn="off"), q4_0_values):
        with (
            pytest.raises(UserError, match="heads have 8") as caught,
            open_runner(stories_gguf, options),
        ):
            pass
        assert "f16" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", "x"),
        ("block_count", 2**32 - 1),
        ("attention.head_count", "ab"),
        ("attention.head_count_kv", [1]),
        ("attention.key_length", "x"),
        ("embedding_length", None),
        ("attention.key_length", float("inf")),
        ("block_count", float("nan")),
    ],
)
def test_invalid_metadata_has_no_prediction(key, value):
    assert kv_size.read_shape({**LLAMA, f"llama.{key}": value}) is None


def test_only_the_first_numbers_of_a_long_array_are_read(tmp_path):
    file = tmp_path / "array"
    file.write_bytes(b"\1" * 8)
    os.truncate(file, 1 << 26)
    heads = GgufArray(file, "uint8", 1 << 26, 0, 1 << 26)
    tracemalloc.start()
    shape = kv_size.read_shape({**LLAMA, "llama.attention.head_count_kv": heads})
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert shape is not None
    texts = replace(heads, kind="string")
    assert kv_size.read_shape({**LLAMA, "llama.attention.head_count_kv": texts}) is None
