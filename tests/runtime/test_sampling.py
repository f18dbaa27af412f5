"""Sampler steps: pure, safe, and equal to llama.cpp's own."""

import ctypes
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.sampler import NativeChains, make
from llmcli.runtime.sampling import Sampling, defaults, find, settings, step_types
from llmcli.runtime.sampling.chain import NumpyChain, make_chain
from llmcli.runtime.sampling.penalties import Penalties
from llmcli.runtime.sampling.temperature import Temperature
from llmcli.runtime.sampling.truncate import MinP, TopK, TopP, Typical
from tests.fakes import FakeRow

NEUTRAL = {"top_k": 0, "typical": 1.0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0, "repeat_penalty": 1.0}
ACTIVE = [
    TopK(5),
    TopK(1),
    TopP(0.7),
    TopP(0.0),
    MinP(0.1),
    Typical(0.6),
    Temperature(0.5),
    Penalties(1.3, 64, 0.2, 0.1),
]


def logits(seed: int, size: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


@pytest.mark.parametrize("kind", step_types(), ids=lambda kind: kind.name)
def test_every_step_is_pure_and_keeps_at_least_one_token(kind):
    step = kind()
    for seed in range(20):
        row = logits(seed)
        before = row.copy()
        out = step(row, [1, 2, 3])
        assert np.array_equal(row, before)
        assert np.isfinite(out).any()


@pytest.mark.parametrize("kind", step_types(), ids=lambda kind: kind.name)
def test_a_neutral_step_changes_nothing(kind):
    step = kind(**{f.name: NEUTRAL[f.name] for f in fields(kind) if f.name in NEUTRAL})
    assert step.neutral
    assert np.array_equal(step(logits(1), [1, 2, 3]), logits(1))


def native(step, row: np.ndarray, tokens: list[int]) -> dict[int, float]:
    """What llama.cpp's own sampler leaves of a row: id -> logit."""
    library = lib()
    sampler = make(step.native(), len(row))
    for token in tokens:
        library.llama_sampler_accept(sampler, token)
    data = (library.llama_token_data * len(row))(*((i, float(v), 0.0) for i, v in enumerate(row)))
    array = library.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
    library.llama_sampler_apply(sampler, ctypes.byref(array))
    library.llama_sampler_free(sampler)
    return {data[i].id: data[i].logit for i in range(array.size) if np.isfinite(data[i].logit)}


@pytest.mark.parametrize("step", ACTIVE, ids=repr)
def test_numpy_and_llama_cpp_agree_on_fixed_logits(step):
    for seed in range(25):
        row, tokens = logits(seed), [3, 3, 7, 11]
        ours = step(row, tokens)
        theirs = native(step, row, tokens)
        kept = np.flatnonzero(np.isfinite(ours))
        assert set(kept.tolist()) == set(theirs)
        assert ours[kept] == pytest.approx([theirs[i] for i in kept.tolist()], abs=1e-5)


def test_temperature_zero_takes_the_likeliest_token_even_with_penalties():
    row = FakeRow(np.array([0, 5, 4.9, 1], np.float32))
    greedy = defaults().with_values({"temp": 0})
    assert make_chain(greedy, 1, None).draw(row, []) == 1
    assert make_chain(greedy.with_values({"presence_penalty": 1}), 1, None).draw(row, [1]) == 2


@dataclass(frozen=True)
class Only:
    """Nothing but one token; llama.cpp has no such sampler."""

    token: int
    name: ClassVar[str] = "only"
    order: ClassVar[int] = 15
    reorders: ClassVar[bool] = True
    neutral: ClassVar[bool] = False

    def __call__(self, row: np.ndarray, tokens: list[int]) -> np.ndarray:
        out = np.full_like(row, -np.inf)
        out[self.token] = row[self.token]
        return out

    def native(self) -> None:
        return None


@pytest.mark.parametrize("temp", [0, 0.8])
def test_a_step_that_llama_cpp_does_not_have_works_at_every_temperature(temp):
    usual = defaults().with_values({"temp": temp})
    sampling = Sampling((Only(7), *usual.steps))
    assert make_chain(sampling, 1, NativeChains(300)).draw(FakeRow(logits(1)), []) == 7


def test_draws_follow_the_probabilities():
    row = FakeRow(np.log(np.array([0.5, 0.3, 0.2], np.float32)))
    chain = NumpyChain([], 7)
    counts = np.bincount([chain.draw(row, []) for _ in range(5000)], minlength=3)
    # 5000 draws: three standard deviations of 0.5 are 0.021
    assert counts / 5000 == pytest.approx([0.5, 0.3, 0.2], abs=0.025)


def test_the_same_seed_draws_the_same():
    row = FakeRow(logits(3))
    one, other = (make_chain(defaults(), 42, None) for _ in range(2))
    assert [one.draw(row, []) for _ in range(20)] == [other.draw(row, []) for _ in range(20)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temp", -1), ("top_p", 1.5), ("top_p", -0.1), ("min_p", 2), ("top_k", -3), ("temp", "nan"), ("temp", "warm"),
     ("seed", 2**40), ("repeat_penalty", 0), ("top_k", "4.5"), ("top_k", 4.5), ("top_k", float("inf")), ("temp", True)],
)  # fmt: skip
def test_a_value_out_of_range_is_one_clear_error(name, value):
    with pytest.raises(UserError, match=name) as caught:
        defaults().with_values({name: value})
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_other_tools_names_and_spellings_are_found():
    assert find("temperature").name == "temp"
    assert find("min-p").name == "min_p"
    with pytest.raises(UserError, match="top_q") as caught:
        find("top_q")
    assert "top_" in caught.value.hint


def test_every_setting_has_help_and_a_default_within_its_limits():
    for setting in settings().values():
        assert setting.help
        assert setting.parse(setting.default) == setting.default
