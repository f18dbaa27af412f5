"""Sampler steps and their settings: steps do not change their input, and settings are validated."""

import json
import math
import tomllib
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.sampling import (
    Sampling,
    default_sampling,
    find_setting,
    sampling_settings,
    step_types,
)
from llmcli.runtime.sampling import logit_bias as bias
from llmcli.runtime.sampling.base import SamplerStep
from llmcli.runtime.sampling.chain import GreedyChain, NumpyChain, make_chain, resolve_seed
from tests.fixtures.fakes import FakeRow, FakeVocabulary

NEUTRAL = {
    "top_k": 0,
    "typical": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "temp": 1.0,
    "repeat_penalty": 1.0,
}
VOCABULARY = FakeVocabulary(lambda token: b"word", lambda token: False, 300)


def logits(seed: int, size: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


@pytest.mark.parametrize("kind", step_types(), ids=lambda kind: kind.name)
def test_every_step_leaves_its_input_unchanged_and_keeps_at_least_one_token(kind):
    step = kind()
    for seed in range(20):
        row = logits(seed)
        before = row.copy()
        out = step(row, [1, 2, 3])
        assert np.array_equal(row, before)
        assert np.isfinite(out).any()


@pytest.mark.parametrize("kind", step_types(), ids=lambda kind: kind.name)
def test_neutral_step_changes_nothing(kind):
    step = kind(**{f.name: NEUTRAL[f.name] for f in fields(kind) if f.name in NEUTRAL})
    assert step.is_neutral
    assert np.array_equal(step(logits(1), [1, 2, 3]), logits(1))


def test_steps_run_in_the_order_of_llama_cpp():
    assert [step.name for step in step_types()] == [
        "logit_bias",
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typical",
        "top_p",
        "min_p",
        "xtc",
        "infill",
        "temperature",
        "mirostat",
    ]


def test_steps_run_in_a_requested_order_and_the_others_change_nothing():
    defaults = default_sampling().with_values({"logit_bias": "7+1", "min_p": 0.1, "seed": 5})
    ordered = defaults.in_order(["temperature", "top-k", "topp", "TYP_P"])
    active = [step.name for step in ordered.steps if not step.is_neutral]
    assert active == ["logit_bias", "temperature", "top_k", "top_p"]  # typical 1.0 is neutral
    assert (ordered["min_p"], ordered["top_k"], ordered["temp"], ordered.seed) == (0, 40, 0.8, 5)
    assert not defaults.in_order(["top_k"]).is_greedy
    chars = defaults.in_order("edskypmxt")
    *others, last = [step.name for step in defaults.steps if step.name != "infill"]
    assert [step.name for step in chars.steps] == [*others, "infill", last]
    with pytest.raises(UserError, match="no sampler 'top_q'"):
        defaults.in_order(["top_q"])


@pytest.mark.parametrize(
    ("step", "window"),
    [
        ({"repeat_penalty": 2}, "repeat_last_n"),
        ({"dry_multiplier": 1, "dry_allowed_length": 1}, "dry_penalty_last_n"),
    ],
)
def test_a_window_of_minus_one_is_the_whole_context(step: dict, window: str):
    """The token 7 follows 5 and 6, first 200 tokens before the end."""
    tokens, row = [5, 6, 7, *range(50, 250), 5, 6], np.ones(300, np.float32)
    for size, is_penalized in ((-1, True), (202, False), (205, True)):
        chain = make_chain(
            default_sampling().with_values({**step, window: size, "temp": 0}), 1, None, VOCABULARY
        )
        assert isinstance(chain, GreedyChain)
        assert (chain.steps[0](row, tokens)[7] < 1) == is_penalized, size


def test_temperature_zero_takes_the_likeliest_token_even_with_penalties():
    row = FakeRow(np.array([0, 5, 4.9, 1], np.float32))
    greedy = default_sampling().with_values({"temp": 0})
    assert make_chain(greedy, 1, None, VOCABULARY).draw(row, []) == 1
    assert (
        make_chain(greedy.with_values({"presence_penalty": 1}), 1, None, VOCABULARY).draw(row, [1])
        == 2
    )
    assert (
        make_chain(greedy.with_values({"logit_bias": "1-inf"}), 1, None, VOCABULARY).draw(row, [])
        == 2
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"xtc_probability": 1, "xtc_threshold": 0},
        {"dynatemp_range": 5},
        {"mirostat": 1},
        {"mirostat": 2},
    ],
)
def test_temperature_zero_uses_no_random_numbers(settings):
    chain = make_chain(
        default_sampling().with_values({"temp": 0, **settings}), 1, NativeChains(300), VOCABULARY
    )
    assert isinstance(chain, GreedyChain)
    assert chain.draw(FakeRow(logits(3)), []) == logits(3).argmax()


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": 1e-7},
        {"temp": 1e-40},
        {"temp": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 80},
    ],
    ids=str,
)
def test_temperature_near_zero_takes_the_likeliest_token_without_overflow(settings):
    row = 10 * logits(3)
    chain = make_chain(default_sampling().with_values(settings), 1, NativeChains(300), VOCABULARY)
    assert {chain.draw(FakeRow(row), []) for _ in range(50)} == {int(row.argmax())}


def test_mirostat_replaces_penalties_and_truncation():
    settings = {
        "mirostat": 2,
        "top_k": 1,
        "presence_penalty": 50,
        "dry_multiplier": 5,
        "logit_bias": "3-inf",
    }
    chain = make_chain(default_sampling().with_values(settings), 1, None, VOCABULARY)
    assert isinstance(chain, NumpyChain)
    row = FakeRow(np.zeros(5, np.float32))
    assert {chain.draw(row, [1, 1, 1]) for _ in range(200)} == {0, 1, 2, 4}


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise_near_its_target(version):
    row = FakeRow((-1.5 * np.log1p(np.arange(5000))).astype(np.float32))
    p = np.exp(row.logits - np.logaddexp.reduce(row.logits))
    for tau in (2.0, 3.5):
        chain = make_chain(
            default_sampling().with_values({"mirostat": version, "mirostat_tau": tau, "temp": 1}),
            7,
            None,
            VOCABULARY,
        )
        tokens = [chain.draw(row, []) for _ in range(1500)][300:]
        # Mirostat controls the surprise among the tokens that it keeps. Among all tokens it is a
        # little larger.
        assert tau - 0.3 < -np.log2(p[tokens]).mean() < tau + 0.9


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_still_draws_randomly_if_the_surprise_stays_below_its_target(version):
    # the surprise is always below the target
    row = FakeRow(np.log(np.array([0.5, 0.3, 0.2], np.float32)))
    chain = make_chain(
        default_sampling().with_values({"mirostat": version, "temp": 1}), 3, None, VOCABULARY
    )
    last_tokens = [chain.draw(row, []) for _ in range(2500)][2000:]
    assert np.bincount(last_tokens, minlength=3) / 500 == pytest.approx([0.5, 0.3, 0.2], abs=0.08)


@dataclass(frozen=True)
class Only(SamplerStep):
    """A step that keeps a single token. llama.cpp has no such sampler."""

    token: int
    name: ClassVar[str] = "only"
    order: ClassVar[int] = 15
    can_reorder: ClassVar[bool] = True
    is_neutral: ClassVar[bool] = False

    def __call__(self, row: np.ndarray, tokens: list[int]) -> np.ndarray:
        out = np.full_like(row, -np.inf)
        out[self.token] = row[self.token]
        return out


@pytest.mark.parametrize("temp", [0, 0.8])
def test_step_without_a_llama_cpp_sampler_works_at_every_temperature(temp):
    defaults = default_sampling().with_values({"temp": temp})
    sampling = Sampling((Only(7), *defaults.steps))
    assert make_chain(sampling, 1, NativeChains(300), VOCABULARY).draw(FakeRow(logits(1)), []) == 7


def test_draws_follow_the_probabilities():
    row = FakeRow(np.log(np.array([0.5, 0.3, 0.2], np.float32)))
    chain = NumpyChain([], 7)
    counts = np.bincount([chain.draw(row, []) for _ in range(5000)], minlength=3)
    # 5000 draws: three standard deviations of 0.5 are 0.021
    assert counts / 5000 == pytest.approx([0.5, 0.3, 0.2], abs=0.025)


@pytest.mark.parametrize(
    "settings", [{}, {"mirostat": 1}, {"mirostat": 2}, {"xtc_probability": 0.5}], ids=str
)
def test_equal_seeds_draw_equal_tokens(settings):
    row = FakeRow(logits(3))
    one, other = (
        make_chain(default_sampling().with_values(settings), 42, None, VOCABULARY) for _ in range(2)
    )
    assert [one.draw(row, []) for _ in range(20)] == [other.draw(row, []) for _ in range(20)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", -1),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2),
        ("top_k", -3),
        ("top_n_sigma", -2),
        ("infill", 2),
        ("repeat_last_n", -2),
        ("temp", "nan"),
        ("temp", "warm"),
        ("seed", 2**40),
        ("repeat_penalty", 0),
        ("top_k", "4.5"),
        ("top_k", 4.5),
        ("top_k", float("inf")),
        ("temp", True),
        ("mirostat", 3),
        ("mirostat", 1.5),
        ("mirostat_tau", -1),
        ("mirostat_eta", 2),
        ("dry_base", 0.5),
        ("dry_multiplier", -1),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", []),
        ("dry_sequence_breakers", [5]),
        ("dry_sequence_breakers", ["x" * 41]),
        ("dry_sequence_breakers", ["x"] * 129),
        ("xtc_probability", 1.1),
        ("xtc_threshold", -0.1),
        ("dynatemp_range", -1),
        ("dynatemp_exponent", "nan"),
        ("logit_bias", "15043"),
        ("logit_bias", "x+1"),
        ("logit_bias", "5+inf"),
        ("logit_bias", "5+nan"),
        ("logit_bias", "5*2"),
        ("logit_bias", "-5+1"),
        ("logit_bias", "5+1e9"),
        ("logit_bias", "5+1001"),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("logit_bias", None),
    ],
)
def test_invalid_value_is_an_error_of_one_line_with_a_hint(name, value):
    with pytest.raises(UserError, match=name) as caught:
        default_sampling().with_values({name: value})
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("15043+1", {15043: 1}),
        ("15043-1.5, 2-INF", {15043: -1.5, 2: -math.inf}),
        (["7 + .5", "8-0.25"], {7: 0.5, 8: -0.25}),
        ({"9": 2, "10": -100, 11: 0.5}, {9: 2, 10: -100, 11: 0.5}),
        ("none", {}),
        ([], {}),
    ],
)
def test_logit_bias_is_a_text_a_list_or_a_dictionary(value, expected):
    sampling = default_sampling().with_values({"logit_bias": value})
    assert dict(bias.parse_biases(sampling["logit_bias"])) == expected
    text = json.dumps(sampling.as_dict(), allow_nan=False)  # as in a saved chat
    assert default_sampling().with_values(json.loads(text)) == sampling
    table = tomllib.loads(f"logit_bias = {json.dumps(sampling['logit_bias'])}")
    assert default_sampling().with_values(table) == sampling


def test_bias_outside_the_vocabulary_or_forbidding_all_of_it_is_refused():
    bias.check_biases(("4+1",), 5)
    with pytest.raises(UserError, match=r"token 5.*ends at 4"):
        bias.check_biases(("5+1",), 5)
    with pytest.raises(UserError, match="every token"):
        bias.check_biases(tuple(f"{token}-inf" for token in range(5)), 5)


def test_random_seed_is_a_valid_value_of_the_setting():
    assert all(find_setting("seed").parse(resolve_seed(-1)) >= 0 for _ in range(100))
    assert resolve_seed(7) == 7


def test_settings_are_found_by_aliases_and_other_spellings():
    assert find_setting("temperature").name == "temp"
    assert find_setting("min-p").name == "min_p"
    assert find_setting("mirostat_ent").name == "mirostat_tau"
    with pytest.raises(UserError, match="top_q") as caught:
        find_setting("top_q")
    assert "top_" in caught.value.hint


def test_every_setting_has_help_and_a_default_within_its_limits():
    for setting in sampling_settings().values():
        assert setting.help
        assert setting.parse(setting.default) == setting.default
        assert setting.parse(setting.format_value(setting.default)) == setting.default
