"""Predicted bytes against the ones llama.cpp allocates: the difference is 0."""

from pathlib import Path

import pytest

from llmcli.runtime import kv
from llmcli.runtime.binding.context import ContextOptions, open_context
from llmcli.runtime.binding.model import open_model
from quant import container

LLAMA = {"general.architecture": "llama", "llama.block_count": 30, "llama.embedding_length": 576,
         "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3}  # fmt: skip


@pytest.mark.parametrize(("kind", "nbytes"), [("f16", 47_185_920), ("q8_0", 25_067_520), ("q4_0", 13_271_040)])
def test_the_worked_example_of_the_notes(kind, nbytes):
    form = kv.shape(LLAMA)
    assert form is not None
    cache = kv.predict(form, 2000, kind, kind, n_ubatch=512)
    assert (cache.nbytes, cache.cells) == (nbytes, 2048)
    assert cache.bytes_per_token * cache.cells == nbytes


def check(path: Path, n_ctx: int, type_k: str, type_v: str, flash: str, slots: int) -> None:
    form = kv.shape(container.read(path).metadata)
    assert form is not None
    options = ContextOptions(n_ctx, 512, 128, slots, 1, 1, type_k, type_v, flash)
    with open_model(path) as model, open_context(model, options) as context:
        held = context.allocated()
        cache = kv.predict(
            form, context.n_ctx, type_k, type_v, n_ubatch=context.n_ubatch, n_seq_max=slots, flash=flash != "off"
        )
        assert held is not None
        assert cache.nbytes - held.context == 0


CASES = [
    (512, "f16", "f16", "auto", 1), (2048, "q8_0", "q8_0", "auto", 1), (1000, "q8_0", "q4_0", "on", 1),
    (1024, "f32", "f16", "off", 1), (768, "bf16", "iq4_nl", "on", 1), (2048, "q5_1", "q5_0", "on", 3),
    (4096, "f16", "f16", "off", 2), (1500, "q4_1", "f16", "auto", 4),
]  # fmt: skip


@pytest.mark.model
@pytest.mark.parametrize(("n_ctx", "type_k", "type_v", "flash", "slots"), CASES)
def test_smollm2(smollm2, n_ctx, type_k, type_v, flash, slots):
    check(smollm2, n_ctx, type_k, type_v, flash, slots)


@pytest.mark.model
@pytest.mark.parametrize(("n_ctx", "type_k", "type_v", "flash", "slots"), CASES)
def test_gemma3_with_its_sliding_window(gemma3, n_ctx, type_k, type_v, flash, slots):
    check(gemma3, n_ctx, type_k, type_v, flash, slots)


def test_what_is_not_known_is_not_guessed():
    assert kv.shape({**LLAMA, "llama.attention.kv_lora_rank": 512}) is None
    assert kv.shape({"general.architecture": "mamba", "mamba.block_count": 4, "mamba.ssm.state_size": 16}) is None
    assert kv.shape({**LLAMA, "llama.attention.sliding_window": 128}) is None
    assert kv.shape({}) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", "x"), ("block_count", 2**32 - 1), ("attention.head_count", "ab"),
     ("attention.head_count_kv", [1]), ("attention.sliding_window", "x"), ("embedding_length", None)],
)  # fmt: skip
def test_a_header_that_makes_no_sense_predicts_nothing(key, value):
    assert kv.shape({**LLAMA, f"llama.{key}": value}) is None
