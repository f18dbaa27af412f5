"""Predicted bytes against the ones llama.cpp allocates: the difference is 0. scripts/benchmarks/kv_size.py
measures more.
"""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from quant.convert import checkpoint_source
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
def test_the_worked_example_of_the_notes(kind, nbytes):
    form = kv_size.read_shape(LLAMA)
    assert form is not None
    cache = kv_size.predict_cache(form, 2000, kind, kind, n_ubatch=512)
    assert (cache.nbytes, cache.cells) == (nbytes, 2048)
    assert cache.bytes_per_token * cache.cells == nbytes


def check(path: Path, n_ctx: int, type_k: str, type_v: str, flash: str, slots: int) -> None:
    form = kv_size.read_shape(read_header.read_header(path).metadata)
    assert form is not None
    options = ContextOptions(n_ctx, 512, 128, slots, 1, 1, type_k, type_v, flash)
    with open_model(path) as model, open_context(model, options) as context:
        held = context.memory_breakdown()
        cache = kv_size.predict_cache(
            form,
            context.n_ctx,
            type_k,
            type_v,
            n_ubatch=context.n_ubatch,
            n_seq_max=slots,
            flash=flash != "off",
        )
        assert held is not None
        assert cache.nbytes - held.context_bytes == 0


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


def test_what_is_not_known_is_not_guessed():
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


def test_a_window_that_llama_cpp_does_not_read_changes_nothing():
    """Mistral v0.1 is a llama with a window in its header."""
    assert kv_size.read_shape(
        {**LLAMA, "llama.attention.sliding_window": 128}
    ) == kv_size.read_shape(LLAMA)


def test_only_compressed_keys_are_kept_where_values_are_made_from_them():
    """DeepSeek V2 Lite: 27 layers of 512 + 64 values, and no V."""
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
    form = kv_size.read_shape(metadata)
    assert form is not None
    cache = kv_size.predict_cache(form, 4096, "f16", "f16", n_ubatch=512)
    assert cache.nbytes == 27 * 4096 * 576 * 2
    assert sum(layer.v_bytes for layer in cache.layers) == 0
    why = kv_size.find_refusal(form, "q8_0", "f16")
    assert why
    assert "-ctk q8_0 -ctv q8_0" in why[1]


# Contexts of the tiny models: type K, type V, flash, one pool, tokens, sequences, micro-batch.
TINY = [
    ("f16", "f16", "auto", True, 300, 1, 512),
    ("q8_0", "q8_0", "auto", False, 2500, 3, 64),
    ("q4_0", "q4_0", "on", True, 2500, 8, 128),
    ("iq4_nl", "iq4_nl", "auto", False, 1024, 8, 16),
    ("f32", "f32", "off", True, 1024, 3, 64),
    ("bf16", "q5_1", "on", False, 700, 2, 32),
]


def check_tiny(path: Path) -> kv_size.CacheShape:
    form = kv_size.read_shape(read_header.read_header(path).metadata)
    assert form is not None
    with open_model(path) as model:
        for type_k, type_v, flash, unified, n_ctx, slots, n_ubatch in TINY:
            options = ContextOptions(
                n_ctx, 512, n_ubatch, slots, 1, 1, type_k, type_v, flash, unified
            )
            if kv_size.find_refusal(form, type_k, type_v):
                with (
                    pytest.raises(UserError, match=r"llama\.cpp refuses"),
                    open_context(model, options),
                ):
                    pass
                continue
            cache = kv_size.predict_cache(
                form,
                n_ctx,
                type_k,
                type_v,
                n_ubatch=n_ubatch,
                n_seq_max=slots,
                flash=flash != "off",
                unified=unified,
            )
            with open_context(model, options) as context:
                held = context.memory_breakdown()
                assert held is not None
                assert cache.nbytes - held.context_bytes == 0, options
                assert cache.cells == context.n_ctx
    return form


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_key_head_some_and_as_many_as_queries(tmp_path, kv_heads):
    assert not check_tiny(
        tiny_gguf.llama(tmp_path / "m.gguf", kv_heads=kv_heads, layers=3)
    ).is_latent


def test_a_tiny_window(tmp_path):
    form = check_tiny(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=7))
    assert form.is_windowed == (True, True, True, True, True, False, True)


@pytest.mark.parametrize(
    "name", ["deepseek v2, compressed queries", "gpt-oss", "gemma2, window on other layers"]
)
def test_compressed_keys_and_the_windows_of_other_families(tmp_path, name):
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    (case,) = (case for case in families.cases() if case.name == name)
    folder, out = families.build(case, tmp_path / "model"), tmp_path / "model.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out, threads=1
    )
    form = check_tiny(out)
    assert form.is_latent == name.startswith("deepseek")


def test_a_window_that_no_layer_has_is_refused_where_llama_cpp_would_abort(tmp_path, monkeypatch):
    def window_of_none(writer: gguf.GGUFWriter, window: int) -> None:
        writer.add_uint32("gemma3.attention.sliding_window", window)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 1)

    monkeypatch.setattr(gguf.GGUFWriter, "add_sliding_window", window_of_none)
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128)
    with (
        pytest.raises(UserError, match="no layer"),
        open_runner(path, RunOptions(ctx_size=256, threads=1)),
    ):
        pass


def test_types_that_a_model_s_heads_do_not_fill_are_refused_before_it_is_loaded(stories_gguf):
    """stories260K has heads of 8 values; llama.cpp refuses some of these pairs and computes
    nonsense for others.
    """
    wanted = RunOptions(
        ctx_size=256, threads=1, batch_size=32, cache_type_k="q8_0", cache_type_v="f16"
    )
    values = replace(wanted, cache_type_k="f16", cache_type_v="q4_0")
    for options in (wanted, replace(wanted, flash_attn="off"), values):
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
    ],
)
def test_a_header_that_makes_no_sense_predicts_nothing(key, value):
    assert kv_size.read_shape({**LLAMA, f"llama.{key}": value}) is None
