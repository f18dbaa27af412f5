"""Names, keys and refusals of every architecture in the registry, compared with the gguf package
and transformers.
"""

import contextlib
import tracemalloc
from typing import Any

import gguf
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.convert import gguf_tables
from quant.convert.archs import ARCHS
from quant.convert.parts import layout, rope
from quant.convert.parts.base import Arch
from quant.errors import UserError
from quant.gguf.layout import encode_entry
from tests.quant import families


def config(case: families.Case, **changes: Any) -> tuple[Arch, CheckpointConfig]:
    """Return the architecture of a case, and its config with `changes` as convert reads it."""
    values = families.settings(case)
    values = {**values, **values.get("text_config", {}), **changes}
    return ARCHS[case.hf].resolve(CheckpointConfig(values, "config.json"))


every_case = pytest.mark.parametrize("case", families.cases(), ids=lambda case: case.name)


def test_each_class_has_one_architecture() -> None:
    assert len(ARCHS) == sum(
        len(arch.hf) for arch in {id(arch): arch for arch in ARCHS.values()}.values()
    )


@every_case
def test_tensor_names_of_an_architecture_exist_in_the_tables(case: families.Case) -> None:
    arch, values = config(case)
    assert arch.name == gguf_tables.architecture_name(arch.kind)
    known = {
        tensor.format(bid=layer) + ending
        for tensor in gguf_tables.tensor_names(arch.kind)
        for layer in range(layout.layer_count(values))
        for ending in (".weight", ".bias", ".scale", "")
    }
    assert set(arch.required_shapes(values)) <= known
    assert set(arch.optional_shapes(values)) <= known
    # Names of any architecture are allowed here: llama.cpp loads rope_freqs.weight for granite,
    # but the gguf package lists this tensor for llama only.
    assert set(arch.extra_tensors(values)) <= known | {
        f"{name}.weight" for name in gguf.TENSOR_NAMES.values()
    }


@every_case
def test_keys_of_an_architecture_are_unique_and_can_be_encoded(case: families.Case) -> None:
    arch, values = config(case)
    assert all(isinstance(note, str) for note in arch.check(values))
    keys = arch.keys(values)
    assert len({key.name for key in keys}) == len(keys)
    assert all(encode_entry(key.kind, key.value) for key in keys)


@pytest.mark.parametrize("name", sorted(ARCHS.keys() - {"NemotronHForCausalLM"}))
def test_too_many_layers_are_refused_before_a_list_has_an_entry_for_each(name: str) -> None:
    """Nemotron H lists its layers in config.json, so that their number is not a setting."""
    case = next(case for case in families.cases() if case.hf == name)

    def read() -> None:
        arch, values = config(case, num_hidden_layers=1 << 24)
        _ = arch.check(values), arch.keys(values)

    tracemalloc.start()
    with pytest.raises(UserError, match=r"llama\.cpp allows 512"):
        read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


LLAMA = next(case for case in families.cases() if case.hf == "LlamaForCausalLM")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("rope", [{"beta_fast": 16}, {"beta_slow": 2.0}, {"truncate": False}])
def test_yarn_settings_that_llama_cpp_does_not_support_are_refused(rope: dict[str, Any]) -> None:
    arch, values = config(LLAMA, rope_scaling=YARN | rope)
    with pytest.raises(UserError, match="beta_fast"):
        arch.check(values)


def test_yarn_attn_factor_excludes_the_factor_that_llama_cpp_applies() -> None:
    default, doubled = (
        {
            key.name: key.value
            for key in rope.rope_scaling_keys(
                CheckpointConfig({"rope_theta": 1e4} | YARN | changes, "config.json")
            )
        }
        for changes in ({}, {"attention_factor": 2.0})
    )
    assert default["rope.scaling.original_context_length"] == 128
    assert default["rope.scaling.attn_factor"] == 1.0
    assert doubled["rope.scaling.attn_factor"] == pytest.approx(2 / (1 + 0.1 * 1.3862944))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ({"rope_scaling": {"mrope_section": [8, 12, 12]}}, "mrope"),
        ({"is_causal": False}, "later positions"),
    ],
)
def test_settings_that_no_family_supports_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    arch, values = config(LLAMA, **changes)
    with pytest.raises(UserError, match=problem):
        arch.check(values)


@pytest.mark.parametrize("name", sorted(name for name in ARCHS if ARCHS[name].defaults))
def test_defaults_of_missing_settings_equal_transformers(name: str) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: configs have no oracle"
    )
    pytest.importorskip(
        "torch", reason="torch is not installed: transformers shows no model's config"
    )
    config = getattr(transformers, name).config_class().get_text_config()
    rotary = rope.rope_settings(CheckpointConfig(config.to_dict(), "")).values
    theirs = {
        key: getattr(type(config), key)
        if hasattr(type(config), key)
        else getattr(config, key, rotary.get(key))
        for key in ARCHS[name].defaults
    }
    assert theirs == ARCHS[name].defaults


FLAT = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
NEAR = {"sliding_attention": {"type": "linear", "factor": 8.0}}
FACTORS = {"rope_type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "Gemma2ForCausalLM",
        {"query_pre_attn_scalar": 144},
        "query_pre_attn_scalar is 144; llama.cpp computes with 64",
    ),
    (
        "Gemma2ForCausalLM",
        {"num_hidden_layers": 46},
        "query_pre_attn_scalar is 64; llama.cpp computes with 32",
    ),
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}, "attn_logit_softcapping is null"),
    ("Gemma2ForCausalLM", {"final_logit_softcapping": None}, "final_logit_softcapping is null"),
    ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window is null"),
    ("Gemma2ForCausalLM", {"tie_word_embeddings": False}, "not tied"),
    ("Gemma2ForCausalLM", {"attention_bias": True}, "biases"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "later tokens"),
    ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "activation is gelu"),
    ("Gemma2ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
    (
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 62},
        "query_pre_attn_scalar is 64; llama.cpp computes with 32",
    ),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attention is capped"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "later tokens"),
    ("Gemma3ForCausalLM", {"rope_parameters": FLAT}, "do not distinguish global layers"),
    ("Gemma3ForCausalLM", {"rope_parameters": NEAR}, "scaled positions"),
    ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
    ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 5 + [[]]}, "layer_types"),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
    (
        "Phi3ForCausalLM",
        {"rope_scaling": FACTORS | {"long_factor": [1.0] * 7}},
        "16 positive numbers",
    ),
    (
        "Phi3ForCausalLM",
        {"rope_scaling": FACTORS | {"short_factor": [True] * 16}},
        "16 positive numbers",
    ),
    ("Phi3ForCausalLM", {"head_dim": 64}, "8 heads of 64 values do not make 256"),
    ("Phi3ForCausalLM", {"attention_bias": True}, "biases"),
    ("Phi3ForCausalLM", {"partial_rotary_factor": 0.1}, "whole rotary pairs"),
    ("Glm4ForCausalLM", {"num_nextn_predict_layers": 1}, "several tokens"),
    ("Glm4ForCausalLM", {"partial_rotary_factor": 1.5}, "whole rotary pairs"),
    ("Glm4ForCausalLM", {"hidden_act": "gelu"}, "activation is gelu"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_settings_that_the_graph_does_not_support_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    arch, values = config(next(case for case in families.cases() if case.hf == name), **changes)
    with pytest.raises(UserError, match=message):
        _ = arch.check(values), arch.keys(values), arch.extra_tensors(values)


def test_su_is_an_alias_of_longrope() -> None:
    phi3 = next(case for case in families.cases() if case.hf == "Phi3ForCausalLM")
    kinds = [
        config(phi3, rope_scaling=FACTORS | {"rope_type": None, "type": kind})
        for kind in ("su", "longrope")
    ]
    assert all(arch.keys(values) == kinds[0][0].keys(kinds[0][1]) for arch, values in kinds)
    assert all(
        arch.extra_tensors(values).keys()
        == {"rope_factors_long.weight", "rope_factors_short.weight"}
        for arch, values in kinds
    )


INVALID_VALUES = [
    "x",
    -1,
    0,
    1.5,
    float("nan"),
    10**12,
    True,
    None,
    [],
    [1],
    [None],
    {},
    {"rope_type": 3},
    {"type": ["yarn"]},
    {"type": "yarn", "factor": "4"},
    {"type": "yarn", "factor": 2, "beta_fast": [1]},
    {"full_attention": 7},
]


@pytest.mark.parametrize("hf", sorted(ARCHS))
def test_any_invalid_setting_is_encoded_or_refused(hf: str) -> None:
    arch, values = config(next(case for case in families.cases() if case.hf == hf))
    optional_settings = (
        "rope_scaling",
        "rope_theta",
        "layer_types",
        "sliding_window",
        "hidden_act",
        "partial_rotary_factor",
    )
    for key in {*values.values, *optional_settings}:
        for value in INVALID_VALUES:
            changed = CheckpointConfig({**values.values, key: value}, "config.json")
            with contextlib.suppress(UserError):
                arch.check(changed)
                assert all(encode_entry(key.kind, key.value) for key in arch.keys(changed))
                assert arch.required_shapes(changed).keys().isdisjoint(arch.extra_tensors(changed))
