"""The numpy steps give the same logits as llama.cpp's samplers, one by one and as chains."""

import ctypes
from collections.abc import Iterable

import numpy as np
import pytest

from llmcli.runtime.binding import sampler as door
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling, step_types
from llmcli.runtime.sampling.base import NativeStep
from llmcli.runtime.sampling.chain import NumpyChain, make_chain
from llmcli.runtime.sampling.dry import Dry
from llmcli.runtime.sampling.infill import Infill
from llmcli.runtime.sampling.logit_bias import LogitBias
from llmcli.runtime.sampling.mirostat import Mirostat, MirostatPicker
from llmcli.runtime.sampling.penalties import Penalties
from llmcli.runtime.sampling.temperature import Temperature
from llmcli.runtime.sampling.top_n_sigma import TopNSigma
from llmcli.runtime.sampling.truncate import MinP, TopK, TopP, TypicalP, softmax
from llmcli.runtime.sampling.xtc import XTC
from tests.fixtures.fakes import FakeRow, FakeVocabulary

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
HISTORY = [3, 3, 7, 11, 5, 6, 7, 11, 2, 5, 6, 7, 11]
ACTIVE = [
    LogitBias(("5+2.5", "7-1", "7-1", "9-inf")),
    Penalties(1.3, 64, 0.2, 0.1),
    Dry(0.8, 1.75, 2, 64),
    Dry(0.8, 1.75, 2, -1),
    Penalties(1.3, -1, 0.2, 0.1),
    TopNSigma(1.2),
    TopK(5),
    TopK(1),
    TypicalP(0.6),
    TopP(0.7),
    TopP(0.0),
    MinP(0.1),
    XTC(1.0, 0.05),
    Temperature(0.5),
    Temperature(0.8, 0.5, 1.3),
]
CHAINS = [
    {},
    {"top_k": 0, "top_p": 0.8, "min_p": 0, "typical": 0.9, "temp": 1.3},
    {
        "repeat_penalty": 1.2,
        "dry_multiplier": 0.9,
        "xtc_probability": 1,
        "xtc_threshold": 0.08,
        "logit_bias": "7+1",
    },
    {
        "top_k": 100,
        "top_p": 1,
        "dynatemp_range": 0.4,
        "dynatemp_exponent": 0.7,
        "presence_penalty": 0.5,
    },
    {"mirostat": 2, "mirostat_tau": 3, "logit_bias": "7+1"},
]
# Values that chi-square exceeds with probability 1/1000, by degrees of freedom. The seeds are
# fixed, so the result is always the same.
RARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, 300).astype(np.float32)


def tied_logits(seed: int) -> np.ndarray:
    return np.round(random_logits(seed))


def masked_logits(seed: int) -> np.ndarray:
    row = random_logits(seed)
    row[seed % 3 :: 3] = -np.inf
    return row


def single_logit(seed: int) -> np.ndarray:
    row = np.full(300, -np.inf, np.float32)
    row[7 * seed] = 1.5
    return row


def large_vocabulary(seed: int) -> np.ndarray:
    """Return logits distributed as in real models: few likely tokens and a long tail."""
    generator = np.random.default_rng(seed)
    rank = generator.permutation(49_152)
    return (-1.5 * np.log1p(rank) + generator.normal(0, 0.1, len(rank))).astype(np.float32)


def uneven_vocabulary(seed: int) -> np.ndarray:
    """Return such logits in ascending order, in a number that is no multiple of the columns of the
    shortlist's table. So the likeliest tokens are in its last, incomplete line.
    """
    return np.sort(large_vocabulary(seed))[: 3 * 4096 + 77]


def candidates(row: np.ndarray):
    """Return a llama_token_data_array of the logits, and the buffer that must live as long."""
    table = np.zeros(len(row), CANDIDATE)
    table["id"], table["logit"] = np.arange(len(row)), row
    data = (lib().llama_token_data * len(row)).from_buffer(table)
    return lib().llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False), data


def remaining(array) -> np.ndarray:
    """Return the candidates that llama.cpp's samplers have left in an array."""
    size = array.size * CANDIDATE.itemsize
    return np.frombuffer(ctypes.string_at(array.data, size), CANDIDATE)


def apply_native(
    steps: Iterable[NativeStep], row: np.ndarray, tokens: list[int], chains: NativeChains
) -> np.ndarray:
    """Return the logits after llama.cpp's samplers, with -inf for dropped tokens like the numpy
    steps.
    """
    array, _alive = candidates(row)
    for native_step in steps:
        sampler = chains.make_sampler(native_step, 1)
        for token in tokens:
            lib().llama_sampler_accept(sampler, token)
        lib().llama_sampler_apply(sampler, ctypes.byref(array))
        lib().llama_sampler_free(sampler)
    out = np.full_like(row, -np.inf)
    table = remaining(array)
    out[table["id"]] = table["logit"]
    return out


def assert_equal(ours: np.ndarray, theirs: np.ndarray, rows) -> None:
    """Assert that two results have the same tokens with the same logits. Among tied logits, other
    tokens may be kept. `rows`: the function that made the logits.
    """
    kept, others = np.isfinite(ours), np.isfinite(theirs)
    both = kept & others
    assert both.any() or rows is tied_logits
    np.testing.assert_allclose(ours[both], theirs[both], rtol=1e-4, atol=1e-4)
    if rows is tied_logits:
        np.testing.assert_allclose(
            np.sort(ours[kept]), np.sort(theirs[others]), rtol=1e-4, atol=1e-4
        )
    else:  # large sums are rounded differently, so one token at the threshold may differ
        assert (kept != others).sum() <= (1 if rows is large_vocabulary else 0)


@pytest.mark.parametrize(
    "rows", [random_logits, tied_logits, masked_logits, single_logit, large_vocabulary]
)
@pytest.mark.parametrize("step", ACTIVE, ids=repr)
def test_step_gives_the_same_logits_as_llama_cpp(step, rows):
    for seed in range(3 if rows is large_vocabulary else 20):
        row = rows(seed)
        steps = step.native()
        assert steps
        assert_equal(
            step(row, HISTORY), apply_native(steps, row, HISTORY, NativeChains(len(row))), rows
        )


def test_every_step_is_compared_with_llama_cpp():
    assert {type(step) for step in ACTIVE} | {Mirostat, Infill} == set(step_types())


def test_infill_keeps_the_tokens_that_llama_cpp_keeps(stories_gguf):
    with open_model(stories_gguf, vocab_only=True) as model:
        apply = Infill(1).bind(model)
        sizes = set()
        for seed in range(200):
            generator = np.random.default_rng(seed)
            row = np.full(model.n_vocab, -np.inf, np.float32)
            tokens = generator.choice(model.n_vocab, 25, replace=False)
            row[tokens] = generator.normal(0, 3, 25)
            row[model.eos] = generator.normal(-6, 4)
            ours = apply(row, [])
            array, _alive = candidates(row[np.isfinite(row)])
            ids = np.flatnonzero(np.isfinite(row))
            for index, token in enumerate(ids):
                array.data[index].id = int(token)
            sampler = lib().llama_sampler_init_infill(model.vocab)
            lib().llama_sampler_apply(sampler, ctypes.byref(array))
            lib().llama_sampler_free(sampler)
            kept = np.flatnonzero(np.isfinite(ours))
            assert set(kept.tolist()) == set(remaining(array)["id"].tolist()), seed
            sizes.add(len(kept))
        assert len(sizes) > 1
    sampling = default_sampling().with_values({"infill": 1, "temp": 0})
    chain = make_chain(sampling, 1, None, make_vocabulary(300))
    assert isinstance(chain, NumpyChain) and len(chain.steps) == 5


@pytest.mark.parametrize(
    "rows", [random_logits, tied_logits, masked_logits, single_logit, large_vocabulary]
)
@pytest.mark.parametrize("settings", CHAINS, ids=str)
def test_chain_gives_the_same_logits_as_llama_cpp(settings, rows):
    sampling = default_sampling().with_values(settings)
    for seed in range(2 if rows is large_vocabulary else 10):
        row = rows(seed)
        chain = make_chain(sampling, 1, None, make_vocabulary(len(row)))
        assert isinstance(chain, NumpyChain)
        ours = row
        for step, _ in chain.steps:
            ours = step(ours, HISTORY)
        chains = NativeChains(len(row))
        recorder = Recorder()
        make_chain(sampling, 1, recorder, make_vocabulary(len(row)))
        theirs = apply_native(
            [
                native_step
                for native_step in recorder.steps
                if not native_step[0].startswith("mirostat")
            ],
            row,
            HISTORY,
            chains,
        )
        assert_equal(ours, theirs, rows)


class Recorder:
    """A chain factory that records the native steps instead of making a chain."""

    def chain(self, steps: list[NativeStep], seed: int) -> None:
        self.steps = steps


def make_vocabulary(size: int) -> FakeVocabulary:
    return FakeVocabulary(lambda token: b"word", lambda token: False, size)


@pytest.mark.parametrize("seed", range(30))
def test_dry_finds_the_repetitions_that_llama_cpp_finds(seed):
    generator = np.random.default_rng(seed)
    # few different tokens, so that there are many nested repetitions
    tokens = generator.integers(0, 2 + seed % 5, 150).tolist()
    step = Dry(0.5 + seed / 10, 1.0 + seed % 3 / 2, seed % 4, int(generator.integers(1, 200)))
    for end in range(0, 150, 7):
        assert_equal(
            step(random_logits(1), tokens[:end]),
            apply_native(step.native(), random_logits(1), tokens[:end], NativeChains(300)),
            random_logits,
        )


@pytest.mark.parametrize("marks", [("\n", ":", '"', "*"), ("a", " the"), ()], ids=str)
def test_dry_has_the_same_sequence_breakers_as_llama_cpp(stories_gguf, marks):
    with open_model(stories_gguf, vocab_only=True) as model:
        vocabulary = model
        step = Dry(0.8, 1.75, 1, 100, marks)
        apply = step.bind(vocabulary)
        breakers = apply.keywords["breakers"]
        assert bool(breakers) == bool(marks)
        chains = NativeChains(model.n_vocab, model.vocab)
        row = np.zeros(model.n_vocab, np.float32)
        n_stopped = 0
        for seed in range(40):
            generator = np.random.default_rng(seed)
            tokens = generator.choice([400, 401, 402, *sorted(breakers)[:2]], 60).tolist()
            ours = apply(row, tokens)
            assert_equal(
                ours,
                apply_native(step.native(), row, tokens, chains),
                random_logits,
            )
            n_stopped += not np.array_equal(ours, step(row, tokens))
        assert (n_stopped > 10) == bool(marks)


def draw_native(chain, row: np.ndarray) -> int:
    """Return the token that a native chain draws from these logits, without a context."""
    array, _alive = candidates(row)
    lib().llama_sampler_apply(chain.pointer, ctypes.byref(array))
    return int(array.data[array.selected].id)


@pytest.mark.parametrize(
    "rows", [random_logits, masked_logits, large_vocabulary, uneven_vocabulary]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5, "temp": 1.4},
        {"top_k": 150, "top_p": 1, "min_p": 0, "temp": 2},
        {"typical": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"dynatemp_range": 0.4},
    ],
    ids=str,
)
def test_draw_from_the_shortlist_equals_the_draw_from_all_candidates(settings, rows, monkeypatch):
    monkeypatch.setattr(door, "min_shortlist_vocabulary", lambda: 0)
    sampling, size = default_sampling().with_values(settings), len(rows(0))
    short_chain, full_chain = (
        make_chain(sampling, 9, NativeChains(size), make_vocabulary(size)) for _ in range(2)
    )
    for seed in range(10 if rows in (large_vocabulary, uneven_vocabulary) else 40):
        row = rows(seed)
        assert short_chain.draw(FakeRow(row), HISTORY) == draw_native(full_chain, row), seed
    short_chain.close()
    full_chain.close()


def test_logits_with_few_possible_tokens_have_no_shortlist(monkeypatch):
    monkeypatch.setattr(door, "min_shortlist_vocabulary", lambda: 0)
    chain = make_chain(default_sampling(), 9, NativeChains(300), make_vocabulary(300))
    assert [
        chain.shortlist(row) for row in (single_logit(1), np.full(300, np.nan, np.float32))
    ] == [
        None,
        None,
    ]
    assert len(chain.shortlist(random_logits(1)).values) >= 40
    chain.close()


def test_answer_with_a_shortlist_equals_the_answer_without(stories_gguf, monkeypatch):
    """With a real model, whose vocabulary is smaller than those that use a shortlist by default."""
    found = []
    for many in (0, 1000):
        monkeypatch.setattr(door, "min_shortlist_vocabulary", lambda many=many: many)
        with open_runner(stories_gguf, RunOptions(ctx_size=256, threads=1)) as runner:
            request = Request(
                runner.encode_text("Once"),
                default_sampling().with_values({"seed": 4, "temp": 1.2}),
                60,
            )
            found.append("".join(event.text for event in runner.reply(request)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "xtc_probability": 0.4,
            "xtc_threshold": 0.15,
            "temp": 1,
            "top_k": 0,
            "top_p": 1,
            "min_p": 0,
        },
        {"mirostat": 2, "mirostat_tau": 1.2, "temp": 1},
        {"mirostat": 1, "mirostat_tau": 1.2, "temp": 1},
        {"dynatemp_range": 0.5, "temp": 1, "top_k": 0, "top_p": 1, "min_p": 0},
    ],
    ids=str,
)
def test_numpy_and_native_draws_follow_the_probabilities(settings):
    row = np.log(np.array([0.4, 0.25, 0.2, 0.1, 0.05], np.float32))
    sampling = default_sampling().with_values(settings)
    expected = expected_probabilities(sampling, row)
    draws = 3000
    for kind in (None, NativeChains(len(row))):
        counts = np.zeros(len(row))
        for seed in range(draws):
            chain = make_chain(sampling, seed, kind, make_vocabulary(len(row)))
            token = (
                chain.draw(FakeRow(row), [])
                if isinstance(chain, NumpyChain)
                else draw_native(chain, row)
            )
            counts[token] += 1
            chain.close()
        possible = expected > 0
        assert not counts[~possible].any()
        gaps = (counts - draws * expected)[possible]
        assert (gaps**2 / (draws * expected[possible])).sum() < RARE[int(possible.sum()) - 1]


def expected_probabilities(sampling, row: np.ndarray) -> np.ndarray:
    """Return the probability of every token at the first draw, from the numpy steps. XTC, which is
    applied at random, is weighted with its probability.
    """

    def probabilities(logits: np.ndarray) -> np.ndarray:
        alive = np.isfinite(logits)
        out = np.zeros(len(row))
        out[alive] = softmax(logits[alive])
        return out

    if sampling["mirostat"]:
        return probabilities(
            next(step for step in sampling.steps if step.name == "mirostat")(row, [])
        )
    without_xtc, with_xtc = row, row
    for step in sampling.steps:
        if step.name == "xtc":
            with_xtc = step(with_xtc, [])
        else:
            without_xtc, with_xtc = step(without_xtc, []), step(with_xtc, [])
    probability = sampling["xtc_probability"]
    return (1 - probability) * probabilities(without_xtc) + probability * probabilities(with_xtc)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_adjusts_mu_like_llama_cpp(version):
    step = Mirostat(version, 4.0, 0.2)
    state = MirostatPicker(step)
    library = lib()
    sampler = (
        library.llama_sampler_init_mirostat_v2(5, 4.0, 0.2)
        if version == 2
        else library.llama_sampler_init_mirostat(49_152, 5, 4.0, 0.2, 100)
    )
    sizes = set()
    for seed in range(25):
        row = large_vocabulary(seed) * np.float32(1 + seed % 3 / 4)
        array, _alive = candidates(row)
        library.llama_sampler_apply(sampler, ctypes.byref(array))
        kept = step.truncate(row, state.mu)
        theirs = np.full_like(row, -np.inf)
        theirs[remaining(array)["id"]] = row[remaining(array)["id"]]
        assert_equal(kept, theirs, large_vocabulary)
        sizes.add(array.size)
        state.record_draw(kept, int(array.data[array.selected].id))
    library.llama_sampler_free(sampler)
    assert len(sizes) > 10  # mu has changed
